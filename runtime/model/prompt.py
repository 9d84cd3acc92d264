"""Prompts of MOSS-TTS-Local: text, voice references and wishes as the rows of ids that the model reads."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moss_runtime.errors import CheckpointError, PromptError
from moss_runtime.model.config import ModelConfig
from moss_runtime.optional import require

MODES = ("generation", "continuation")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class PromptBuilder:
    """Builds prompts with the tokenizer of a checkpoint.

    The layout is the one of the official processor. Each piece of text is tokenized by itself, without special tokens
    around it, because a byte pair merge across a border would give ids that the model was not trained on.

    Args:
        tokenizer_path: the checkpoint's `tokenizer.json`.
        config: gives the token ids, the pad code and the codebook sizes.

    Raises:
        CheckpointError: the tokenizer is missing or cannot be read.
    """

    def __init__(self, tokenizer_path: str | Path, config: ModelConfig):
        tokenizers = require("tokenizers", "building prompts")
        path = Path(tokenizer_path)
        if not os.path.isfile(path):
            raise CheckpointError(f"{path}: no such tokenizer file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from error
        self._path = path
        self._config = config

    def build(
        self,
        text: str,
        *,
        references: Sequence[Tensor] = (),
        mode: str = "generation",
        prompt_audio: Tensor | None = None,
        tokens: int | None = None,
        language: str | None = None,
        instruction: str | None = None,
        quality: str | None = None,
        sound_event: str | None = None,
        ambient_sound: str | None = None,
    ) -> Tensor:
        """Lays out one prompt.

        Args:
            text: what to speak; may be empty. `[pause 3.2s]` inside it asks for a pause and is passed on as text.
            references: each [frames, n_vq] integer. Codes of recordings whose voice is to be used, in order.
            mode: "generation", or "continuation" of `prompt_audio`, whose words then begin `text`.
            prompt_audio: [frames, n_vq] integer. Codes of the recording to continue; with mode "continuation" only.
            tokens: wished length in frames of 80 ms.
            language, instruction, quality, sound_event, ambient_sound: wishes in words; None leaves one out.

        Returns:
            [T, 1 + n_vq] int64. Text id, then one code per codebook; the pad code in all of them on a text row.

        Raises:
            PromptError: a field has a wrong type, shape or range; the message names it.
        """
        config = self._config
        if mode not in MODES:
            raise PromptError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if (prompt_audio is not None) != (mode == "continuation"):
            got = "none" if prompt_audio is None else "one"
            raise PromptError(f'prompt_audio goes with mode "continuation" and only with it, got {got} with "{mode}"')
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens <= 0):
            raise PromptError(f"tokens must be a positive number of frames, got {tokens!r}")

        wishes = {
            "Instruction": _text("instruction", instruction),
            "Tokens": tokens,
            "Quality": _text("quality", quality),
            "Sound Event": _text("sound_event", sound_event),
            "Ambient Sound": _text("ambient_sound", ambient_sound),
            "Language": _text("language", language),
        }
        fields = "".join(f"\n- {name}:\n{value}" for name, value in wishes.items())

        rows = [self._ids([config.im_start_token_id]), self._tokenize("user\n<user_inst>\n- Reference(s):\n")]
        if len(references) == 0:
            rows.append(self._tokenize("None"))
        for index, codes in enumerate(references):
            rows.append(self._ids([config.audio_start_token_id]))
            rows.append(self._codes(f"references[{index}]", codes, config.audio_user_slot_token_id))
            rows.append(self._ids([config.audio_end_token_id]))
        rows += [
            self._tokenize(fields + "\n- Text:\n"),
            self._tokenize(_text("text", text, required=True)),
            self._tokenize("\n</user_inst>"),
            self._ids([config.im_end_token_id]),
            self._tokenize("\n"),
            self._ids([config.im_start_token_id]),
            self._tokenize("assistant\n"),
            self._ids([config.audio_start_token_id]),
        ]
        if prompt_audio is not None:
            rows.append(self._codes("prompt_audio", prompt_audio, config.audio_assistant_slot_token_id))
        return torch.cat(rows)

    def _ids(self, ids: list[int]) -> Tensor:
        rows = torch.full((len(ids), 1 + self._config.n_vq), self._config.audio_pad_token_id, dtype=torch.int64)
        rows[:, 0] = torch.tensor(ids, dtype=torch.int64)
        return rows

    def _tokenize(self, text: str) -> Tensor:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        size = self._config.backbone.vocab_size
        if ids and max(ids) >= size:
            raise CheckpointError(f"{self._path}: token id {max(ids)} is outside the model's vocabulary of {size}")
        return self._ids(ids)

    def _codes(self, name: str, codes: Tensor, text_id: int) -> Tensor:
        n_vq = self._config.n_vq
        if not isinstance(codes, Tensor) or codes.dtype not in INTEGERS:
            raise PromptError(f"{name} must be an integer tensor of codes, got {_kind(codes)}")
        if codes.ndim != 2 or codes.shape[1] != n_vq or codes.shape[0] == 0:
            raise PromptError(f"{name} must be [frames >= 1, {n_vq}], got {tuple(codes.shape)}")
        codes = codes.to("cpu", torch.int64)
        size = self._config.audio_vocab_size
        wrong = (codes < 0) | (codes >= size)
        if wrong.any():
            frame, codebook = wrong.nonzero()[0].tolist()
            raise PromptError(
                f"{name}: codes must be 0 .. {size - 1}, got {codes[frame, codebook]} "
                f"at frame {frame}, codebook {codebook}"
            )
        return torch.cat([torch.full((len(codes), 1), text_id, dtype=torch.int64), codes], dim=1)


def _text(name: str, value: str | None, required: bool = False) -> str | None:
    if value is None and not required:
        return None
    if not isinstance(value, str):
        raise PromptError(f"{name} must be text, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{name} is not valid Unicode at position {error.start}") from None
    return value


def _kind(value: object) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
