"""A small random checkpoint pair in the official file layout, to try and to test the whole path without a download.

Its speech is noise. Same files, byte for byte, at every run and on every machine with the same package versions.
"""

import json
import os
import re
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from moss_runtime.errors import CheckpointError, UserError
from moss_runtime.model.checkpoint import read_config
from moss_runtime.model.codec import Codec, CodecConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.tts import MossTTS
from moss_runtime.optional import require

NAME = "moss-tts-demo"
SPECIAL_TOKENS = ("pad", "im_start", "im_end", "audio_start", "audio_end", "audio_user_slot", "audio_assistant_slot")
VOCABULARY = 512
HIDDEN = 64
CODEBOOKS, CODEBOOK_SIZE = 12, 1024
CONTEXT = 8192
HEAD_DIM = 32
# The logit of stopping is STOP_BIAS plus about 20 times the generated part of the context.
STOP_BIAS, STOP_SLOPE, FRACTION_GAIN = -8.0, 14.0, 5.0

TRAINING_TEXT = """\
user
<user_inst>
- Reference(s):
None
- Instruction:
- Tokens:
- Quality:
- Sound Event:
- Ambient Sound:
- Language:
English
- Text:
</user_inst>
assistant
The harbour lights go out one by one while the ferry waits for the morning tide.
Nobody in the village could remember when the old clock had last told the right time.
Please read this sentence slowly, then pause for a moment and read it once more.
She opened the window, listened to the rain on the roof, and began to write the letter.
A small model needs only a few words to learn from, as long as they are common words.
What would you like to hear today: a story, the weather, or something about the sea?
"""


def write_demo_checkpoint(directory: str | Path) -> None:
    """Writes `config.json`, `model.safetensors`, `tokenizer.json` and the codec in `audio_tokenizer/`.

    Args:
        directory: new, empty, or an older demo checkpoint.

    Raises:
        UserError: the directory holds something else, or cannot be written.
    """
    target = Path(directory)
    try:
        if target.is_dir() and any(target.iterdir()) and not is_demo(target):
            raise UserError(f"{target}: holds other files; name a new directory")
        with tempfile.TemporaryDirectory(dir=Path(os.path.realpath(target)).parent, prefix=".moss-tts-demo.") as name:
            partial = Path(name)
            _write_model(partial)
            _write_tokenizer(partial / "tokenizer.json")
            _write_codec(partial / "audio_tokenizer")
            for source in sorted(partial.rglob("*.*")):
                destination = target / source.relative_to(partial)
                destination.parent.mkdir(parents=True, exist_ok=True)
                os.replace(source, destination)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from error


def is_demo(directory: str | Path) -> bool:
    """Whether the directory holds a demo checkpoint, whose speech is noise."""
    try:
        return read_config(directory).get("_name_or_path") == NAME
    except CheckpointError:
        return False


def _model_config() -> dict[str, Any]:
    backbone = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    }
    local = {
        "model_type": "gpt2",
        "n_embd": HIDDEN,
        "n_head": 4,
        "n_inner": 160,
        "n_layer": 1,
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-6,
        "position_embedding_type": "rope",
        "rope_base": 1e6,
    }
    return {
        "_name_or_path": NAME,
        "architectures": ["MossTTSLocalModel"],
        "model_type": "moss_tts_local",
        "qwen3_config": backbone,
        "language_config": backbone,
        "gpt2_config": local,
        "n_vq": CODEBOOKS,
        "audio_vocab_size": CODEBOOK_SIZE,
        "audio_codebook_sizes": [CODEBOOK_SIZE] * CODEBOOKS,
        "audio_pad_token_id": CODEBOOK_SIZE,
        "audio_pad_code": CODEBOOK_SIZE,
        **{f"{token}_token_id": index for index, token in enumerate(SPECIAL_TOKENS)},
        "local_text_head_mode": "binary",
        "sampling_rate": 48_000,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
    }


def _codec_config() -> dict[str, Any]:
    """The real codec's rates and windows; narrow, with two layers in the first stage and one in the others."""
    features, between = 64, 64
    seconds = (10, 10, 8, 4, 2, 1)
    decoder, encoder = [], []
    for stage, context in enumerate(seconds):
        last = stage == len(seconds) - 1
        sizes = features if stage == 0 else between // 2, 240 if last else between
        width = 128 if stage == 0 else 64
        transformer = {
            "module_type": "Transformer",
            "d_model": width,
            "num_heads": width // 64,
            "num_layers": 2 if stage == 0 else 1,
            "dim_feedforward": 2 * width,
            "causal": True,
            "norm": "layer_norm",
            "positional_embedding": "rope",
            "max_period": 10_000,
            "gating": "none",
            "layer_scale": 0.01,
            "conv_layout": True,
            "context_duration": context,
        }
        patch = {"module_type": "PatchedPretransform", "patch_size": 240 if last else 2}
        decoder += [{**transformer, "input_dimension": sizes[0], "output_dimension": sizes[1]}, patch]
        encoder = [patch, {**transformer, "input_dimension": sizes[1], "output_dimension": sizes[0]}, *encoder]
    return {
        "_name_or_path": NAME,
        "architectures": ["MossAudioTokenizerModel"],
        "model_type": "moss-audio-tokenizer",
        "sampling_rate": 48_000,
        "downsample_rate": 3840,
        "number_channels": 2,
        "enable_channel_interleave": True,
        "causal_transformer_context_duration": 10,
        "encoder_kwargs": encoder,
        "decoder_kwargs": decoder,
        "quantizer_type": "rlfq",
        "quantizer_kwargs": {
            "quantizer_type": "rlfq",
            "input_dim": features,
            "rvq_dim": 32,
            "output_dim": features,
            "num_quantizers": CODEBOOKS,
            "codebook_size": CODEBOOK_SIZE,
            "codebook_dim": 8,
        },
    }


def _write_model(directory: Path) -> None:
    config = _model_config()
    tensors = _random_tensors(MossTTS.on_meta(ModelConfig.from_dict(config)))
    _set_stop_rule(tensors)
    _write(directory, config, {name: tensor.bfloat16() for name, tensor in tensors.items()})


def _write_codec(directory: Path) -> None:
    config = _codec_config()
    with torch.device("meta"):
        codec = Codec(CodecConfig.from_dict(config))
    directory.mkdir()
    tensors = _random_tensors(codec)
    tensors[f"decoder.{len(config['decoder_kwargs']) - 2}.output_proj.weight"] *= 1 / 32  # a level that is safe to play
    _write(directory, config, tensors)


def _write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "model.safetensors").write_bytes(save(dict(tensors), metadata={"format": "pt"}))


def _random_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: _values(name, tuple(meta.shape)) for name, meta in module.state_dict().items()}


def _values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that keep activations near unit variance: uniform around a centre, from the name alone.

    Raw generator words and single fp32 operations, so that no platform's libm shows in the bytes.
    """
    centre, spread = 0.0, (3 / np.prod(shape[1:], dtype=int)) ** 0.5
    if re.search(r"(norm\d?|ln_\w)\.weight$", name) or name.endswith("weight.original0"):
        centre, spread = 1.0, 0.2
    elif name.endswith(".bias"):
        spread = 0.1
    elif name.endswith(".scale"):
        centre, spread = 0.3, 0.1
    elif re.search(r"embed_tokens|codebook", name):
        spread = 1.0
    elif "audio_embeddings" in name:
        spread = 0.5  # also the heads: scores of a standard deviation of about 2
    words = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    unit = (words >> 40).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    return torch.from_numpy(np.float32(centre) + unit * np.float32(spread)).reshape(shape)


def _set_stop_rule(tensors: dict[str, Tensor]) -> None:
    """Lets the stop head see how much of the context is generated, so that speech grows with the text and then ends.

    Feature 0 of the local transformer's output is the constant 1, the stop head's bias. Feature 1 marks generated rows;
    one attention head of the first layer, which looks everywhere equally, averages it into feature 2, and everything
    else leaves the two alone.
    """
    constant, generated, fraction = 0, 1, 2
    tensors["local_transformer.ln_f.weight"][constant] = 0
    tensors["local_transformer.ln_f.bias"][constant] = 1
    embeddings = [name for name in tensors if re.search(r"embed_tokens|audio_embeddings", name)]
    into_residual = [name for name in tensors if re.search(r"(o_proj|down_proj|c_proj|fc_out)\.", name)]
    for name in embeddings:
        tensors[name][:, [generated, fraction]] = 0
    for name in into_residual:
        tensors[name][[generated, fraction]] = 0
    slot = SPECIAL_TOKENS.index("audio_assistant_slot")
    tensors["transformer.embed_tokens.weight"][slot, generated] = 1
    attention = "transformer.layers.0.self_attn"
    tensors[f"{attention}.q_proj.weight"][:HEAD_DIM] = 0
    tensors[f"{attention}.v_proj.weight"][0] = torch.eye(HIDDEN)[generated]
    tensors[f"{attention}.o_proj.weight"][fraction] = 0
    tensors[f"{attention}.o_proj.weight"][fraction, 0] = FRACTION_GAIN
    head = tensors["local_text_lm_head.weight"]
    head *= 0.1
    head[:, [constant, fraction]] = torch.tensor([[0.0, 0.0], [STOP_BIAS, STOP_SLOPE]])


def _write_tokenizer(path: Path) -> None:
    tokenizers = require("tokenizers", "writing a demo checkpoint")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[f"<|{token}|>" for token in SPECIAL_TOKENS],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(keepends=True), trainer)
    tokenizer.save(str(path))
