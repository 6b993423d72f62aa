"""Reading a checkpoint's tensors: safetensors folders, GGUF files, random numbers.

What every `WeightSource` of this package promises to `sonar.models`, whatever the file's own habits are:

- **Names are Hugging Face's** for the text model alone (`model.layers.0...`, `transformer.h.0...`, `lm_head.weight`); a
  multimodal checkpoint's prefix is resolved here.
- **Matrices come as (N, K) = (out features, in features)**, gpt2's Conv1D weights too, which its safetensors hold as
  (K, N). A fused matrix (gpt2 `c_attn`, phi3 `qkv_proj` and `gate_up_proj`) is one matrix.
- **Values are Hugging Face's**: GGUF's permuted Q and K rows of arch llama come back in order, and gemma's norm weights
  come without the 1 that GGUF adds to them (the model multiplies by 1 + weight).
- `tie_word_embeddings` in `ModelConfig` says whether `lm_head.weight` is asked for; `has` never has to be asked for it.
"""
