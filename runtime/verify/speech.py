"""What listeners would notice: words that a recogniser understands, and whose voice it is, by models of others."""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moss_runtime.errors import UserError
from moss_runtime.graphs.runtime import Runtime
from moss_runtime.model.codec import Codec
from moss_runtime.model.tts import MossTTS
from moss_runtime.optional import require
from moss_runtime.verify.checks import seeded, speak
from moss_runtime.verify.results import Result

# Other codes of the same distribution are spoken a little differently: so much more may be misheard, or twice as much.
MAX_RATE_LOSS = 0.1

# Audio [n] float32 in mono, and its sampling rate, to a text or to an embedding [D].
Recogniser = Callable[[Tensor, int], str]
SpeakerModel = Callable[[Tensor, int], Tensor]


def load_recogniser(directory: str, device: torch.device) -> Recogniser:
    """A model for `transformers.pipeline("automatic-speech-recognition")`.

    Raises:
        UserError: there is no such directory or model, or transformers is not installed.
    """
    transformers = _transformers("--asr", directory)
    options = {"model": directory, "device": device}
    pipeline = _loaded("--asr", directory, lambda: transformers.pipeline("automatic-speech-recognition", **options))
    target = pipeline.feature_extractor.sampling_rate

    def recognise(audio: Tensor, rate: int) -> str:
        return pipeline({"raw": _resampled(audio, rate, target), "sampling_rate": target})["text"]

    return recognise


def load_speaker_model(directory: str, device: torch.device) -> SpeakerModel:
    """A model for `transformers.AutoModelForAudioXVector`. Raises: as `load_recogniser`."""
    transformers = _transformers("--speaker", directory)
    parts = transformers.AutoFeatureExtractor, transformers.AutoModelForAudioXVector
    extractor, model = _loaded("--speaker", directory, lambda: [part.from_pretrained(directory) for part in parts])
    model = model.to(device).eval()
    target = extractor.sampling_rate

    @torch.no_grad()
    def embed(audio: Tensor, rate: int) -> Tensor:
        inputs = extractor(_resampled(audio, rate, target), sampling_rate=target, return_tensors="pt")
        return model(**{name: value.to(device) for name, value in inputs.items()}).embeddings[0].float().cpu()

    return embed


@torch.no_grad()
def verify_speech(
    model: MossTTS,
    codec: Codec,
    prompts: Sequence[Tensor],
    texts: Sequence[str],
    *,
    frames: int,
    recognise: Recogniser | None,
    embed: SpeakerModel | None,
) -> Iterator[Result]:
    """Speech of the runtime, streamed, against that of the eager model, decoded offline, from the same seeds.

    Args:
        model, codec: as in `verify`.
        prompts: [T, 1+n_vq] int64 of each text.
        texts: what is to be heard.
        frames: most frames of each prompt.
        recognise, embed: None leaves out what needs it.
    """
    longest = max(map(len, prompts))
    runtime = Runtime(model, codec, rows=len(prompts), max_tokens=longest + frames, max_frames=frames)
    runtime.warm_up()
    fast = [audio.mean(0).cpu() for audio in speak(runtime, prompts).audio]
    generated = model.generate(prompts, seeded(len(prompts)), max_frames=frames)
    reference = [codec.decode(one.codes[None])[0].mean(0).cpu() for one in generated]
    implementation = "graph" if model.device.type == "cuda" else "eager"
    rate = codec.config.sampling_rate
    if recognise is not None:
        heard = [[recognise(audio, rate) if len(audio) else "" for audio in spoken] for spoken in (fast, reference)]
        yield from error_rates(texts, *heard, implementation)
    if embed is not None:
        pairs = [pair for pair in zip(fast, reference, strict=True) if all(map(len, pair))]
        yield similarity([[embed(audio, rate) for audio in pair] for pair in pairs], implementation)


def error_rates(
    texts: Sequence[str], fast: Sequence[str], reference: Sequence[str], implementation: str
) -> Iterator[Result]:
    """Word and character error rates of what was heard; the reference's own are what they are held to."""
    for name, cut in (("words misheard", str.split), ("characters misheard", lambda text: text.replace(" ", ""))):
        rate, allowed = (error_rate(texts, heard, cut) for heard in (fast, reference))
        note = f"{rate:.1%}, from the eager model {allowed:.1%}"
        bound = max(allowed + MAX_RATE_LOSS, 2 * allowed)
        yield Result(name, implementation, error=rate, bound=bound, cases=len(texts), note=note)


def similarity(pairs: Sequence[Sequence[Tensor]], implementation: str) -> Result:
    """Cosines between embeddings [D] of the same prompt's speech; how alike two voices are depends on who judges."""
    name = "speaker similarity"
    if not pairs:
        return Result(name, implementation, failure="there was no speech to compare")
    cosines = [float(F.cosine_similarity(one, other, dim=0)) for one, other in pairs]
    note = f"{sum(cosines) / len(cosines):.3f} to the eager model, the least {min(cosines):.3f}"
    return Result(name, implementation, cases=len(cosines), note=note)


def error_rate(texts: Iterable[str], heard: Iterable[str], cut: Callable[[str], Sequence[str]]) -> float:
    """Insertions, deletions and substitutions in all texts over their length, of what `cut` makes of plain words."""
    pairs = [(cut(plain(text)), cut(plain(other))) for text, other in zip(texts, heard, strict=True)]
    return sum(edit_distance(*pair) for pair in pairs) / sum(len(expected) for expected, _ in pairs)


def plain(text: str) -> str:
    """Lower-case words with a space between: neither case nor punctuation is heard."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    joined = folded.replace("'", "").replace("\u2019", "")
    kept = (letter if unicodedata.category(letter)[0] in "LMN" else " " for letter in joined)
    return " ".join("".join(kept).split())


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Fewest insertions, deletions and substitutions that make one sequence the other."""
    row = list(range(len(other) + 1))
    for index, item in enumerate(one):
        diagonal, row[0] = row[0], index + 1
        for column, candidate in enumerate(other):
            best = min(diagonal + (item != candidate), row[column] + 1, row[column + 1] + 1)
            diagonal, row[column + 1] = row[column + 1], best
    return row[-1]


def _transformers(option: str, directory: str) -> Any:
    if not Path(directory).is_dir():
        raise UserError(f"{option}: there is no directory {directory}")
    return require("transformers", option)


def _loaded(option: str, directory: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # whatever is wrong with files that others have made
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{option} {directory}: transformers cannot load it ({reason})") from error


def _resampled(audio: Tensor, rate: int, target: int) -> Any:
    samples = audio.numpy()
    return samples if rate == target else require("soxr", "resampling audio").resample(samples, rate, target)
