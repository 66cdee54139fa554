"""edgekv: Llama- and GPT-2-style models on small machines, with the KV cache in one to four bits."""
