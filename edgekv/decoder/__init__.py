"""The decoder: a prompt or a token through embedding, layers and head, on the CPU and on CUDA."""
