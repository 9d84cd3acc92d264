"""Random weights with realistic gains: activations of order one, so that every part shows in the output."""

import math

import torch

from moss_kernels.local_frame_decode import LocalFrameWeights

PAD_TOKEN_ID, AUDIO_ASSISTANT_SLOT_TOKEN_ID = 1, 2

# Sizes that the CUDA kernel is built for, as arguments of `local_frame_weights`.
LOCAL_FRAME_SIZES = {
    "full": {"hidden": 2560, "ffn": 9728, "n_head": 32, "vocab": 1024},
    "tiny": {"hidden": 256, "ffn": 512, "n_head": 4, "vocab": 128},
}

# Standard deviation of the code embeddings, which are both the residual of the block and (tied) the heads. The block's
# two branches are scaled to add about as much.
_EMBEDDING_STD = 0.25
_LOGIT_STD = 2.5


def local_frame_weights(
    seed: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    hidden: int = 2560,
    ffn: int = 9728,
    n_head: int = 32,
    codebooks: int = 12,
    vocab: int = 1024,
    text_vocab: int = 32,
    never_stop: bool = False,
) -> LocalFrameWeights:
    """Weights of a local transformer for inputs of unit variance, MOSS-TTS-Local v1.5 by default.

    Attention scores have a standard deviation of about 2, the logits of a codebook one of about 2.5, as in a trained
    model where top_k and top_p matter; about half of all frames stop.

    Args:
        seed: The same weights for the same seed, device kind, dtype and sizes.
        device: Where to make them.
        dtype: Of all tensors.
        hidden: H.
        ffn: F, inner size of the MLP.
        n_head: Attention heads.
        codebooks: Q.
        vocab: V; the pad code is V.
        text_vocab: Rows of `embed_tokens`, at least 3; a real model has many more.
        never_stop: The stop head gives "stop" a probability of exactly 0 at text temperatures up to 2.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(std).add_(mean).to(dtype)

    def linear(outputs: int, inputs: int, gain: float) -> torch.Tensor:
        return normal(outputs, inputs, std=gain / math.sqrt(inputs))

    def norm_weight(scale: float) -> torch.Tensor:
        return (scale * (0.7 + 0.6 * torch.rand(hidden, generator=generator, device=device))).to(dtype)

    head_scale = _LOGIT_STD / (_EMBEDDING_STD * math.sqrt(hidden))
    query_key, value = linear(2 * hidden, hidden, 1.4), linear(hidden, hidden, 1.0)
    ln_f_weight, ln_f_bias = norm_weight(head_scale), normal(hidden, std=0.3 * head_scale, mean=0.3 * head_scale)
    if never_stop:
        stop_head = _stop_head_that_continues(ln_f_weight.float(), ln_f_bias.float()).to(dtype)
    else:
        stop_head = linear(2, hidden, 1 / head_scale)
    return LocalFrameWeights(
        ln_1_weight=norm_weight(1.0),
        ln_1_bias=normal(hidden, std=0.2),
        c_attn_weight=torch.cat((query_key, value)),
        c_attn_bias=normal(3 * hidden, std=0.2),
        c_proj_weight=linear(hidden, hidden, 0.4),
        c_proj_bias=normal(hidden, std=0.1),
        ln_2_weight=norm_weight(1.0),
        ln_2_bias=normal(hidden, std=0.2),
        fc_in_weight=linear(ffn, hidden, 1.5),
        fc_in_bias=normal(ffn, std=0.2),
        fc_out_weight=linear(hidden, ffn, 0.4),
        fc_out_bias=normal(hidden, std=0.1),
        ln_f_weight=ln_f_weight,
        ln_f_bias=ln_f_bias,
        stop_head=stop_head,
        audio_embeddings=normal(codebooks, vocab, hidden, std=_EMBEDDING_STD),
        embed_tokens=normal(text_vocab, hidden, std=_EMBEDDING_STD),
        n_head=n_head,
        rope_base=1e6,
        layer_norm_epsilon=1e-6,
        pad_token_id=PAD_TOKEN_ID,
        audio_pad_token_id=vocab,
        audio_assistant_slot_token_id=AUDIO_ASSISTANT_SLOT_TOKEN_ID,
    )


def _stop_head_that_continues(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    # A normalised vector n sums to 0, so weight * n is orthogonal to 1 / weight: of ln_f's output only the bias shows.
    direction = 1 / weight
    logit = 30 * direction / (direction @ bias)
    return torch.stack((logit, -logit))
