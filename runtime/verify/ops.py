"""`OpCheck`: compares the implementations of each op with its reference on the arguments that a program passes."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moss_kernels import _library
from moss_kernels.backbone_linear.reference import backbone_linear_reference
from moss_kernels.chunk_epilogue.reference import chunk_epilogue_reference
from moss_kernels.chunk_prologue.reference import chunk_prologue_reference
from moss_kernels.codec_linear.reference import codec_linear_op_reference
from moss_kernels.embed_codes.reference import embed_codes_reference
from moss_kernels.frame_bookkeeping.reference import (
    frame_bookkeeping_begin_reference,
    frame_bookkeeping_end_reference,
)
from moss_kernels.kv_append.reference import kv_append_reference
from moss_kernels.local_rope_attention.reference import (
    local_rope_attention_lookup_reference,
    local_rope_attention_reference,
)
from moss_kernels.paged_attention.reference import paged_attention_reference
from moss_kernels.prefill_attention.reference import prefill_attention_reference
from moss_kernels.prefill_linear.reference import prefill_linear_reference
from moss_kernels.ring_attention.reference import ring_attention_reference, whole_qkv
from moss_kernels.ring_kv_write.reference import ring_kv_write_reference
from moss_kernels.rms_norm.reference import add_rms_norm_reference
from moss_kernels.sample_codebook.reference import sample_codebook_reference
from moss_kernels.sample_head.reference import sample_head_reference
from moss_runtime.verify.results import Result, Results, compare

BACKENDS = ("cuda", "triton", "reference")
# Written, but no result.
_SCRATCH = ("scratch", "partials", "arrived", "workspace", "moments")
# Exact: all implementations draw the bits that the CPU draws.
_DRAWS = ("sample_codebook", "sample_head")


def _returned(reference: Callable[..., object], *arguments: object) -> None:
    *inputs, out = arguments
    out.copy_(reference(*inputs))


def _lookup(*arguments: object) -> None:
    *inputs, out, residual = arguments
    for output, value in zip((out, residual), local_rope_attention_lookup_reference(*inputs), strict=True):
        output.copy_(value)


def _ring_attention(*arguments: object) -> None:
    qkv, cos_sin, ring_k, *rest, write, _ = arguments
    step = whole_qkv(qkv, ring_k.dtype), cos_sin, ring_k, *rest
    ring_attention_reference(*step)
    if write:
        ring_kv_write_reference(*step[:7])


# Each takes the arguments of the op and writes what the op writes. They are not taken from the ops themselves, so that
# an op that calls something else shows.
REFERENCES: dict[str, Callable[..., None]] = {
    "backbone_linear": backbone_linear_reference,
    "chunk_epilogue": chunk_epilogue_reference,
    "chunk_prologue": chunk_prologue_reference,
    "codec_linear": codec_linear_op_reference,
    "embed_codes": partial(_returned, embed_codes_reference),
    "frame_bookkeeping_begin": frame_bookkeeping_begin_reference,
    "frame_bookkeeping_end": frame_bookkeeping_end_reference,
    "kv_append": kv_append_reference,
    "local_rope_attention": partial(_returned, local_rope_attention_reference),
    "local_rope_attention_lookup": _lookup,
    "paged_attention": lambda *arguments: paged_attention_reference(*arguments[:-3]),
    "prefill_attention": prefill_attention_reference,
    "prefill_linear": prefill_linear_reference,
    "ring_attention": _ring_attention,
    "ring_kv_write": ring_kv_write_reference,
    "rms_norm": add_rms_norm_reference,
    "sample_codebook": sample_codebook_reference,
    "sample_head": sample_head_reference,
}


class OpCheck(TorchDispatchMode):
    """Inside, each op of `moss_kernels` is compared before it runs, once for each layer and shape.

    All implementations that work here get copies of the arguments. Floats may err, against the reference in float64, at
    most twice as much as the reference in their own dtype (see `compare`); everything else must be equal to it.
    """

    def __init__(self, results: Results):
        super().__init__()
        self._results = results
        self._known: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "moss":
            arguments = _arguments(func, args, kwargs)
            key = func, *(_identity(value, spec) for value, spec in zip(arguments, func._schema.arguments, strict=True))
            if key not in self._known:
                self._known.add(key)
                self._compare(func, arguments)
        return func(*args, **kwargs)

    def _compare(self, op: torch._ops.OpOverload, arguments: list[object]) -> None:
        name = op._schema.name.removeprefix("moss::")
        exact, eager = (_copies(op, arguments, dtype, on_cpu=name in _DRAWS) for dtype in (torch.float64, None))
        if name in _DRAWS:
            exact = eager
        for copies in (exact, eager) if exact is not eager else (eager,):
            REFERENCES[name](*copies)
        device = next(value.device for value in arguments if isinstance(value, Tensor))
        for implementation, context in _implementations(device):
            actual = _copies(op, arguments, None)
            try:
                with context:
                    op(*actual)
            except NotImplementedError:
                continue
            except Exception as error:  # whatever a compiler or a driver raises is a finding
                self._results.add(Result(name, implementation, failure=f"{type(error).__name__}: {error}"[:200]))
                continue
            for result in _results(name, implementation, op, actual, exact, eager):
                self._results.add(result)


def _implementations(device: torch.device) -> Iterator[tuple[str, contextlib.AbstractContextManager]]:
    if device.type != "cuda":
        yield "reference", contextlib.nullcontext()
        return
    for backend in BACKENDS:
        yield backend, _library.forced_backend(backend)


def _arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[object]:
    specs = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(spec.name, spec.default_value) for spec in specs)]


def _is_written(spec: torch._C.Argument) -> bool:
    return spec.alias_info is not None and spec.alias_info.is_write


def _identity(value: object, spec: torch._C.Argument) -> object:
    """Weights and pages are told apart by where they lie; outputs and numbers by their kind alone."""
    if not isinstance(value, Tensor):
        return value
    return value.shape, value.dtype, None if spec.name in ("out", *_SCRATCH) else value.data_ptr()


def _copies(
    op: torch._ops.OpOverload, arguments: list[object], dtype: torch.dtype | None, *, on_cpu: bool = False
) -> list[object]:
    """Arguments whose written tensors are copies; floats in another dtype if one is given."""

    def copy(value: object, spec: torch._C.Argument) -> object:
        if not isinstance(value, Tensor):
            return value
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        device = "cpu" if on_cpu else value.device
        return value.to(device, wanted, copy=_is_written(spec))

    return [copy(value, spec) for value, spec in zip(arguments, op._schema.arguments, strict=True)]


def _results(
    name: str, implementation: str, op: torch._ops.OpOverload, actual: list, exact: list, eager: list
) -> Iterator[Result]:
    """One for each tensor that the op writes."""
    floats = [value.dtype for value in actual if isinstance(value, Tensor) and value.is_floating_point()]
    dtype = max(floats, key=lambda kind: torch.finfo(kind).eps, default=None)
    for index, spec in enumerate(op._schema.arguments):
        if not _is_written(spec) or spec.name in _SCRATCH or actual[index] is None:
            continue
        got, true, plain = (_meaningful(name, spec.name, arguments, index) for arguments in (actual, exact, eager))
        if got.is_floating_point():
            yield Result(name, implementation, **compare(got, true, plain, dtype))
        else:
            same = int((got == plain.to(got.device)).sum())
            yield Result(name, implementation, codes=got.numel(), equal=same)


def _meaningful(name: str, output: str, arguments: list, index: int) -> Tensor:
    """An output without the rows that may hold anything."""
    value = arguments[index]
    if (name, output) == ("paged_attention", "out"):
        return value[arguments[10]]
    if (name, output) == ("ring_attention", "out"):
        tokens = torch.arange(value.shape[1], device=value.device)
        return value[tokens < arguments[5][:, None]]
    return value
