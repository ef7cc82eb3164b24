"""SGLang's prefill and decode servers on KVSpec's transport."""
