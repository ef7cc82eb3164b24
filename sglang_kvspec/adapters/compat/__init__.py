"""Private names of SGLang, one small module per topic; only this folder may import `sglang.srt`.

A new SGLang release moves such names, so each module says why KVSpec needs them. The modules
re-export and add nothing. One module loads little beside its topic: the CPU platform and the flags
are needed before most of SGLang is imported.
"""
