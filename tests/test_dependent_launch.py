"""Kernels that may start early wait before they touch what another kernel writes, in the compiled code too."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moss_kernels import _launch
from moss_kernels.chunk_prologue import triton_kernel as chunk_prologue

OPS = (
    "backbone_linear",
    "chunk_epilogue",
    "codec_linear",
    "kv_append",
    "paged_attention",
    "ring_attention",
    "ring_kv_write",
    "rms_norm",
)
# Hints, and volatile loads of what chooses them.
HARMLESS = re.compile(r"prefetch|ld\.volatile")
TOUCHES_MEMORY = re.compile(r"\b(ld\.global|st\.global|cp\.async\.(ca|cg|bulk)|red\.|atom\.)\S*")
# Loads of a norm's parameters, which no kernel writes, ahead of the wait: weight and bias in parts, and with partial
# sums their scale; weight.
PARAMETER_LOADS = {
    "layer_norm_kernel": lambda sizes: (3 if sizes["SPLITS"] else 2) * triton.cdiv(sizes["K"], sizes["BLOCK_K"]),
    "rms_norm_kernel": lambda sizes: 1,
}


def accesses_before_wait(ptx: str) -> list[str]:
    """Global memory accesses above `griddepcontrol.wait`, which must be there once."""
    head, *tails = re.split(r"griddepcontrol\.wait", ptx)
    assert len(tails) == 1, f"{len(tails)} waits"
    lines = [line.strip() for line in head.splitlines() if not HARMLESS.search(line)]
    return [line for line in lines if TOUCHES_MEMORY.search(line)]


def specs():
    """One variant of each kernel and tile, that of bfloat16 where there is one."""
    chosen = {}
    for op in OPS:
        for spec in importlib.import_module(f"moss_kernels.{op}.triton_kernel").compile_specs():
            kernel, signature, constexprs, _ = spec
            if constexprs.get("DEPENDENT") and ("*bf16" in signature.values() or op == "chunk_epilogue"):
                kinds = ("BLOCK", "NORM", "ROUNDS", "SPLITS")
                tile = tuple(value for name, value in constexprs.items() if name.startswith(kinds))
                chosen.setdefault((kernel.__name__, *tile), spec)
    return chosen


@pytest.mark.parametrize("name", sorted({name for name, *_ in specs()}))
def test_nothing_is_touched_before_the_wait(name):
    for kernel, signature, constexprs, options in (spec for key, spec in specs().items() if key[0] == name):
        pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
        source = ASTSource(kernel, signature, constexprs, {(index,): [["tt.divisibility", 16]] for index in pointers})
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        early = accesses_before_wait(ptx)
        allowed = PARAMETER_LOADS[name](constexprs) if name in PARAMETER_LOADS else 0
        assert len(early) == allowed and all("ld.global" in access for access in early), (constexprs, early)
        ahead, behind = ptx.split("griddepcontrol.wait")
        if name == "backbone_linear_kernel":  # between two of these a third would start beside the first
            assert "launch_dependents" in behind and "launch_dependents" not in ahead, constexprs
        if name == "rms_norm_kernel" or constexprs.get("SPLITS"):
            loads, sums = behind.split("griddepcontrol.launch_dependents")
            assert "launch_dependents" in ahead and "ld.global" in loads and "ld.global" not in sums, constexprs


def test_the_start_of_a_chunk_is_no_part_of_it():
    """`ring_attention` of settled inputs relies on that: it reads ahead of its wait what this kernel writes."""
    for kernel, signature, constexprs, options in chunk_prologue.compile_specs():
        source = ASTSource(kernel, signature, constexprs)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert "griddepcontrol" not in ptx
    codes, table, slots = torch.zeros(1, 2, 3, dtype=torch.int16), torch.zeros(3, 4, 8), torch.zeros(1).int()
    offsets, rates = torch.zeros(1, 2).long(), torch.ones(1).int()
    written = torch.empty(1, 2, 8), torch.empty(1, 1).int(), torch.empty(2, 8, 2)
    with mock.patch.object(chunk_prologue, "chunk_prologue_kernel") as kernel:
        chunk_prologue.chunk_prologue_triton(codes, table, slots, slots, offsets, rates, torch.ones(8), *written)
    (launch,) = kernel.__getitem__.return_value.call_args_list
    assert not launch.kwargs.get("launch_pdl")


def test_an_early_access_is_seen():
    wait = "\tgriddepcontrol.wait; // dummy %r1\n"
    for access in ("@%p1 ld.global.v4.b32 {%r1}, [%rd1];", "cp.async.cg.shared.global [%r2], [%rd1], 0x10, %r3;"):
        assert accesses_before_wait(f"\t{access}\n{wait}") == [access]
        assert accesses_before_wait(f"{wait}\t{access}\n") == []
    assert accesses_before_wait(f"\tst.global.b16 [%rd1], %rs1;\n{wait}") != []
    assert accesses_before_wait(f"\tld.volatile.global.b32 %r1, [%rd1];\n{wait}") == []


@pytest.mark.parametrize("default", [False, True])
def test_the_switch_overrides_an_op_and_needs_a_hopper(default):
    device = torch.device("cuda")
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        for enabled in (False, True, None):
            with mock.patch.object(_launch, "enabled", enabled):
                expected = default if enabled is None else enabled
                assert _launch.dependent_launch(device, default=default) == expected
                assert not _launch.dependent_launch(torch.device("cpu"), default=default)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(_launch, "enabled", True),
    ):
        assert not _launch.dependent_launch(device, default=default)


def small_ops():
    """CUDA C++ launchers that no other test sees ask, and arguments for them."""
    rows, one = torch.zeros(1, dtype=torch.int32), torch.ones(1)
    draw = rows, rows > 0, one, rows, one, one, rows.long(), rows, rows[None, None], 1, 0, 8, rows.long(), rows
    table, cache, row = torch.zeros(1, 8, 8), torch.zeros(1, 12, 1, 8), torch.zeros(1, 8)
    return {
        "embed_codes_cuda": (rows.long(), rows.long()[None], table[0], table, 8, row),
        "local_rope_attention_cuda": (torch.zeros(1, 24), cache, cache, 1, row, row, row),
        "local_rope_attention_lookup_cuda": (rows.long(), table, table, cache, cache, 1, row, row),
        "sample_codebook_cuda": (row, *draw),
        "sample_head_cuda": (row, row, row, *draw),
    }


@pytest.mark.parametrize("name", small_ops())
def test_the_switch_reaches_small_ops(monkeypatch, name):
    op = name.removesuffix("_cuda").removesuffix("_lookup")
    module = importlib.import_module(f"moss_kernels.{op}.cuda_kernel")
    asks = importlib.import_module("moss_kernels.sample_codebook.cuda_kernel") if op == "sample_head" else module
    function = mock.Mock(return_value=0)
    monkeypatch.setattr(module, "_function", lambda: function)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock(return_value=mock.Mock(cuda_stream=0)))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for wanted in (False, True):
        with mock.patch.object(asks, "dependent_launch", return_value=wanted) as ask:
            getattr(module, name)(*small_ops()[name])
        ask.assert_called_once_with(torch.device("cpu"), default=True)
        params = function.call_args.args[0]._obj
        assert getattr(params, "draw", params).dependent_launch == wanted


def test_another_value_of_the_switch_is_refused():
    command = [sys.executable, "-c", "import moss_kernels"]
    run = subprocess.run(command, env=os.environ | {"MOSS_DEPENDENT_LAUNCH": "yes"}, capture_output=True, text=True)
    assert run.returncode and "MOSS_DEPENDENT_LAUNCH must be 0 or 1, or not set, got 'yes'" in run.stderr
