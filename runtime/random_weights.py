"""Models and codecs with random weights of realistic gains, made on the device, for benchmarks and GPU tests."""

import torch

from moss_kernels.testing.backbone import FULL_BACKBONE, backbone_weights
from moss_kernels.testing.codec_weights import codec_weights
from moss_kernels.testing.weights import (
    AUDIO_ASSISTANT_SLOT_TOKEN_ID,
    LOCAL_FRAME_SIZES,
    PAD_TOKEN_ID,
    local_frame_weights,
)
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.codec.config import PatchConfig, QuantizerConfig, TransformerConfig
from moss_runtime.model.config import BackboneConfig, LocalConfig, ModelConfig
from moss_runtime.model.tts import MossTTS

TEXT_VOCAB = 32
AUDIO_START = 3
# A backbone to go with the small model of the frame kernel.
TINY_BACKBONE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
# Decoder stages from the codes to the samples, each followed by a patch that doubles the rate, the last one by samples:
# layers, width, window in tokens.
FULL_CODEC = ((32, 1280, 125), (12, 768, 250), *[(12, 768, 400)] * 4)
TINY_CODEC = ((1, 64, 8), (1, 64, 16))


def config(size: str, layers: int | None = None) -> ModelConfig:
    """MOSS-TTS-Local v1.5 ("full") or a small model ("tiny"), with few text ids and as many layers as wanted."""
    local = LOCAL_FRAME_SIZES[size]
    sizes = FULL_BACKBONE | (TINY_BACKBONE if size == "tiny" else {}) | {"vocab_size": TEXT_VOCAB}
    return ModelConfig(
        backbone=BackboneConfig(**sizes | ({"num_hidden_layers": layers} if layers else {})),
        local=LocalConfig(local["hidden"], local["n_head"], local["ffn"], layer_norm_epsilon=1e-6, rope_base=1e6),
        n_vq=12,
        audio_vocab_size=local["vocab"],
        audio_pad_token_id=local["vocab"],
        pad_token_id=PAD_TOKEN_ID,
        im_start_token_id=4,
        im_end_token_id=5,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=6,
        audio_user_slot_token_id=7,
        audio_assistant_slot_token_id=AUDIO_ASSISTANT_SLOT_TOKEN_ID,
    )


def random_model(
    size: str, *, device: str, dtype: torch.dtype, layers: int | None = None, never_stop: bool = True
) -> MossTTS:
    """A model of `config(size, layers)`.

    Args:
        size: "full" or "tiny".
        device, dtype: of the weights.
        layers: of the backbone; None: all.
        never_stop: requests end at their limit; else about half of all frames stop.
    """
    model = MossTTS.on_meta(config(size, layers))
    shapes = {name: tensor.shape for name, tensor in model.transformer.state_dict().items()}
    backbone = backbone_weights(shapes, 0, device=device, dtype=dtype)
    local = local_frame_weights(
        1, device=device, dtype=dtype, **LOCAL_FRAME_SIZES[size], text_vocab=TEXT_VOCAB, never_stop=never_stop
    )
    tensors = {f"transformer.{name}": tensor for name, tensor in backbone.items()}
    tensors["transformer.embed_tokens.weight"] = local.embed_tokens
    tensors["local_text_lm_head.weight"] = local.stop_head
    for q, table in enumerate(local.audio_embeddings):
        tensors[f"audio_embeddings.{q}.weight"] = table
    modules = {"ln_1": "h.0.ln_1", "c_attn": "h.0.attn.c_attn", "c_proj": "h.0.attn.c_proj", "ln_2": "h.0.ln_2"}
    modules |= {"fc_in": "h.0.mlp.fc_in", "fc_out": "h.0.mlp.fc_out", "ln_f": "ln_f"}
    for name, module in modules.items():
        for kind in ("weight", "bias"):
            tensors[f"local_transformer.{module}.{kind}"] = getattr(local, f"{name}_{kind}")
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(False).eval()


def random_prompts(model: MossTTS, lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Prompts [T, 13] int64 on the CPU: text rows, some rows of codes, and the audio_start row."""
    generator, pad = torch.Generator().manual_seed(seed), model.config.audio_pad_token_id
    prompts = []
    for length in lengths:
        rows = torch.randint(TEXT_VOCAB, (length, 1 + model.config.n_vq), generator=generator)
        rows[torch.rand(length, generator=generator) < 0.7, 1:] = pad
        rows[-1, 0], rows[-1, 1:] = AUDIO_START, pad
        prompts.append(rows)
    return prompts


def codec_config(size: str) -> CodecConfig:
    """MOSS-Audio-Tokenizer v2 ("full"), or a codec to go with the small model ("tiny"), at 12.5 frames a second."""
    stages, last, features = (FULL_CODEC, 240, 768) if size == "full" else (TINY_CODEC, 16, 64)
    patches = [2] * (len(stages) - 1) + [last]
    # What comes out of a stage is what its patch makes the next stage's input of.
    outputs = [1280, *[768] * 4, last] if size == "full" else [64, last]
    decoder, encoder, width = [], [], features
    for (layers, d_model, context), patch, output in zip(stages, patches, outputs, strict=True):
        shape = {"d_model": d_model, "heads": d_model // 64, "layers": layers, "feedforward_size": 4 * d_model}
        shape |= {"context": context, "max_period": 10_000.0}
        decoder += [TransformerConfig(input_size=width, output_size=output, **shape), PatchConfig(patch)]
        encoder = [PatchConfig(patch), TransformerConfig(input_size=output, output_size=width, **shape), *encoder]
        width = output // patch
    channels, samples = 2, last * 2 ** (len(stages) - 1) // 2
    books, vocab = config(size).n_vq, config(size).audio_vocab_size
    quantizer = QuantizerConfig(features, 512 if size == "full" else 32, features, books, vocab, codebook_dim=8)
    return CodecConfig(samples * 25 // 2, channels, samples, quantizer, tuple(encoder), tuple(decoder))


def random_codec(
    config: CodecConfig, *, device: torch.device | str, dtype: torch.dtype = torch.float32, encoder: bool = False
) -> Codec:
    """A codec with random weights.

    Args:
        config: of the codec.
        device: of the weights.
        dtype: of encoder and decoder; the quantizer is float32.
        encoder: with its encoder; else it only decodes.
    """
    with torch.device("meta"):
        codec = Codec(config)
    if not encoder:
        codec.encoder = torch.nn.ModuleList()
    shapes = {name: tensor.shape for name, tensor in codec.state_dict().items()}
    codec.load_state_dict(codec_weights(shapes, 0, device=device), assign=True)
    codec.encoder.to(dtype)
    codec.decoder.to(dtype)
    return codec.requires_grad_(False).eval()
