"""An OpenAI-compatible server of one model: `edgekv serve`."""
