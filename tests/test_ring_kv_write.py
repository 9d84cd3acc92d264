"""ring_kv_write: the touched positions bit by bit, and nothing else, in every implementation."""

import ctypes

import pytest
import torch

from moss_kernels import _library, ring_kv_write
from moss_kernels.ring_kv_write import cuda_kernel
from moss_kernels.testing.compare import implementation, require_equal
from moss_kernels.testing.ring import RingInputs

NULL = 5
ROWS = [(2, 40, 123_456), (0, 17, 3), (4, 1, 70), (3, 0, 9), (NULL, 0, 0), (1, 33, 1_000_003)]
DTYPES = [torch.float32, torch.bfloat16]
CAPACITIES = [70, 40, 13, 1]


def make_inputs(*, rows=ROWS, tokens=40, capacity=70, head_dim=16, dtype=torch.float32) -> RingInputs:
    size = {"slots": NULL, "tokens": tokens, "heads": 3, "head_dim": head_dim, "capacity": capacity}
    return RingInputs.make(rows, **size, window=capacity, dtype=dtype)


def expected_rings(inputs: RingInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Token after token, later ones over earlier ones; float32 without contraction, rounded once."""
    ring_k, ring_v = inputs.ring_k.clone(), inputs.ring_v.clone()
    heads, capacity, head_dim = ring_k.shape[1:]
    _, k, v = inputs.qkv.unflatten(-1, (3, heads, head_dim)).unbind(2)
    for row, (slot, count) in enumerate(zip(inputs.slots.tolist(), inputs.valid.tolist(), strict=True)):
        for token in range(count):
            position = (int(inputs.offset[slot]) + token) % capacity
            cos, sin = inputs.cos_sin[row, token].T
            even, odd = k[row, token, :, 0::2].float(), k[row, token, :, 1::2].float()
            ring_k[slot, :, position, 0::2] = (even * cos - odd * sin).to(k.dtype)
            ring_k[slot, :, position, 1::2] = (even * sin + odd * cos).to(k.dtype)
            ring_v[slot, :, position] = v[row, token]
    return ring_k, ring_v


def bits(x: torch.Tensor) -> torch.Tensor:
    """So that NaN equals NaN."""
    return x.view({4: torch.int32, 2: torch.int16}[x.element_size()])


def require_written(write, inputs: RingInputs, device="cpu") -> None:
    moved = inputs.to(device)
    write(*moved.step)
    for name, ring, expected in zip("kv", (moved.ring_k, moved.ring_v), expected_rings(inputs), strict=True):
        require_equal(f"ring_{name}", bits(ring), bits(expected))
        assert not ring[NULL].any()
    require_equal("offset", moved.offset, inputs.offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_op(capacity, dtype):
    require_written(ring_kv_write, make_inputs(capacity=capacity, dtype=dtype))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_rotated_already(dtype, device):
    inputs = make_inputs(dtype=dtype)
    turned = inputs.rotated().to(device)
    ring_kv_write(*turned.step)
    for name, expected in zip(("ring_k", "ring_v"), expected_rings(inputs), strict=True):
        require_equal(name, bits(getattr(turned, name)), bits(expected))


@pytest.mark.interpreter
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_triton_in_the_interpreter(tokens, capacity):
    rows = [(slot, min(valid, tokens), offset) for slot, valid, offset in ROWS]
    require_written(implementation("ring_kv_write", "triton"), make_inputs(rows=rows, tokens=tokens, capacity=capacity))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("capacity", [*CAPACITIES, 400])
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_kernels_on_the_gpu(tokens, capacity, head_dim, dtype, name):
    rows = [(slot, min(5 * valid, tokens), offset) for slot, valid, offset in ROWS]
    inputs = make_inputs(rows=rows, tokens=tokens, capacity=capacity, head_dim=head_dim, dtype=dtype)
    require_written(implementation("ring_kv_write", name), inputs, "cuda")


@pytest.mark.parametrize("rows", [[(NULL, 0, 0)] * 3, [(2, 0, 50), (NULL, 0, 0)], []])
def test_padding_writes_nothing(rows):
    if rows:
        require_written(ring_kv_write, make_inputs(rows=rows))
    else:
        inputs = make_inputs()
        empty = (inputs.qkv[:0], inputs.cos_sin[:0], inputs.ring_k, inputs.ring_v, inputs.slots[:0], inputs.valid[:0])
        before = bits(inputs.ring_k.clone())
        ring_kv_write(*empty, inputs.offset)
        require_equal("ring_k", bits(inputs.ring_k), before)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def op_arguments(device="cpu") -> tuple[torch.Tensor, ...]:
    return tuple(x.nan_to_num() if x.is_floating_point() else x for x in make_inputs().to(device).step)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    torch.library.opcheck(torch.ops.moss.ring_kv_write.default, op_arguments(device))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_into_a_full_graph(device):
    def step(qkv, cos_sin, ring_k, ring_v, *rest):
        ring_kv_write(qkv * 2, cos_sin, ring_k, ring_v, *rest)
        return ring_k + 1

    eager, compiled = op_arguments(device), op_arguments(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    expected = step(*eager)
    actual = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)(*compiled)
    require_equal("result", actual, expected)
    for index in (2, 3):
        require_equal("ring", compiled[index], eager[index])


def test_wrong_argument_is_named():
    qkv, *rest = op_arguments()
    with pytest.raises(ValueError, match=r"`ring_kv_write`: `qkv` must be \[B, T, 3\*H\*D\] with 3\*H\*D = 144"):
        ring_kv_write(qkv[..., 1:].contiguous(), *rest)
    with pytest.raises(TypeError, match=r"`ring_kv_write`: `offset` must be int64, got int32"):
        ring_kv_write(qkv, *rest[:-1], rest[-1].int())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("struct_size", 8, "`struct_size` must be .*, got 8"),
        ("batch", 65536, r"`batch` must be 0 \.\. 65535, got 65536"),
        ("heads", 0, r"`heads` must be 1 \.\. 65535, got 0"),
        ("head_dim", 20, "`head_dim` must be a multiple of 8, got 20"),
        ("capacity", 0, "`capacity` must be >= 1, got 0"),
        ("dtype", 3, "`dtype` must be a MossDtype, got 3"),
        ("slots", None, "`slots` must not be null"),
        ("ring_v", 0x1008, "`ring_v` must be aligned to 16 bytes, got 0x1008"),
        ("offset", 0x1004, "`offset` must be aligned to 8 bytes, got 0x1004"),
    ],
)
def test_the_library_refuses_bad_arguments(moss_library, field, value, message):
    pointers = dict.fromkeys(("qkv", "cos_sin", "ring_k", "ring_v", "slots", "valid", "offset"), 0x1000)
    sizes = {"batch": 1, "tokens": 2, "heads": 2, "head_dim": 16, "capacity": 4}
    header = {"struct_size": ctypes.sizeof(cuda_kernel.RingKvWriteParams), "abi_version": _library.ABI_VERSION}
    params = cuda_kernel.RingKvWriteParams(**header | sizes | pointers | {field: value})
    with pytest.raises(ValueError, match=f"`ring_kv_write`: {message}"):
        _library.check_status(cuda_kernel._function()(ctypes.byref(params)))
