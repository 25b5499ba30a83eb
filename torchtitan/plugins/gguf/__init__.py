"""Weights for llama.cpp and Ollama: `torchtitan export FOLDER --format gguf`."""
