"""SGLang's prefill and decode servers on our transport."""
