"""embed_codes: the official rounding order, pad codes and strange ids, the same bits in every implementation."""

import ctypes

import pytest
import torch

from moss_kernels import _library, embed_codes
from moss_kernels.embed_codes import cuda_kernel, embed_codes_reference, triton_kernel
from moss_kernels.testing.compare import require_equal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODEBOOKS, VOCAB, TEXT_VOCAB = 12, 37, 11


def make_inputs(batch: int, width: int, dtype: torch.dtype, *, strange: bool = False) -> tuple:
    """Arguments before `out`: strided ids as slices of prompt rows, one code in five is V, which is the pad code.

    `strange` ids are outside their tables, and the pad code is inside.
    """
    rows = torch.randint(VOCAB, (batch, 1 + CODEBOOKS))
    rows[torch.rand(rows.shape) < 0.2] = VOCAB
    rows[:, 0] = torch.randint(TEXT_VOCAB, (batch,))
    if strange:
        rows[::2, 1::3] = torch.tensor([-1, VOCAB + 1, 2**40, -(2**40)])
        rows[1, 0], rows[2, 0] = -1, TEXT_VOCAB
    embed_tokens = torch.randn(TEXT_VOCAB, width).to(dtype)
    audio_embeddings = torch.randn(CODEBOOKS, VOCAB, width).to(dtype)
    return rows[:, 0], rows[:, 1:], embed_tokens, audio_embeddings, 5 if strange else VOCAB


def run(implementation, arguments: tuple, device: str = "cpu") -> torch.Tensor:
    arguments = tuple(argument.to(device) if torch.is_tensor(argument) else argument for argument in arguments)
    shape = (arguments[0].shape[0], arguments[2].shape[1])
    out = torch.full(shape, torch.nan, dtype=arguments[2].dtype, device=device)
    implementation(*arguments, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_adds_one_by_one(dtype):
    text_ids, codes, embed_tokens, audio_embeddings, pad_id = arguments = make_inputs(9, 24, dtype)
    expected = embed_tokens[text_ids]
    for q in range(CODEBOOKS):
        for row in range(9):
            if codes[row, q] != pad_id:
                expected[row] = expected[row] + audio_embeddings[q, codes[row, q]]
    require_equal("out", run(embed_codes, arguments), expected)


def test_every_add_rounds():
    # Steps of bf16 are 2 at 256: each 0.75 is lost on its own, while their sum of 9 would not be.
    tables = torch.full((CODEBOOKS, 4, 1), 0.75, dtype=torch.bfloat16)
    codes = torch.zeros(1, CODEBOOKS, dtype=torch.int64)
    text = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    assert embed_codes_reference(torch.tensor([0]), codes, text, tables, 4).item() == 256


def test_pad_codes_add_nothing():
    tables = torch.arange(1.0, 9.0).reshape(2, 4, 1)
    tables[:, 0] = torch.nan
    codes = torch.tensor([[[4, 4], [4, 2], [3, 1]]])
    embeds = embed_codes_reference(torch.tensor([[1, 0, 1]]), codes, torch.tensor([[10.0], [20.0]]), tables, 4)
    assert embeds.flatten().tolist() == [20.0, 10.0 + 7, 20.0 + 4 + 6]


def test_a_pad_code_inside_the_table_adds_nothing():
    tables = torch.ones(2, 4, 1)
    embeds = embed_codes_reference(torch.tensor([0]), torch.tensor([[2, 3]]), torch.zeros(1, 1), tables, 2)
    assert embeds.item() == 1


@pytest.mark.parametrize(
    ("name", "column", "value"), [("text_ids", 0, TEXT_VOCAB), ("text_ids", 0, -1), ("codes", 3, VOCAB + 1)]
)
def test_the_cpu_validates_ids(name, column, value):
    arguments = make_inputs(4, 8, torch.float32)
    (arguments[0] if column == 0 else arguments[1][:, column - 1])[2] = value
    with pytest.raises(ValueError, match=rf"`embed_codes`: `{name}` must be in 0 \.\. \d+.*, got {value}$"):
        run(embed_codes, arguments)


def test_bad_arguments_are_named():
    text_ids, codes, embed_tokens, audio_embeddings, pad_id = make_inputs(4, 8, torch.float32)
    out = torch.empty(4, 8)
    with pytest.raises(
        ValueError, match=r"`audio_embeddings` must be \[Q, V, H\] with Q = 12, H = 8, got \(11, 37, 8\)"
    ):
        embed_codes(text_ids, codes, embed_tokens, audio_embeddings[:11], pad_id, out)
    with pytest.raises(TypeError, match="`audio_embeddings` must be float32, got bfloat16"):
        embed_codes(text_ids, codes, embed_tokens, audio_embeddings.bfloat16(), pad_id, out)
    with pytest.raises(TypeError, match="`codes` must be int64, got int32"):
        embed_codes(text_ids, codes.int(), embed_tokens, audio_embeddings, pad_id, out)
    with pytest.raises(ValueError, match="`out` must be contiguous"):
        embed_codes(text_ids, codes, embed_tokens, audio_embeddings, pad_id, torch.empty(8, 4).T)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("abi_version", 0, "`abi_version` must be 1, got 0"),
        ("batch", 65536, r"`batch` must be 0 \.\. 65535, got 65536"),
        ("width", 0, r"`width` must be >= 1, got 0"),
        ("dtype", 3, "`dtype` must be a MossDtype, got 3"),
        ("codes", None, "`codes` must not be null"),
        ("out", 0x1008, "`out` must be aligned to 16 bytes, got 0x1008"),
    ],
)
def test_the_library_refuses_bad_arguments(moss_library, field, value, message):
    pointers = dict.fromkeys(("text_ids", "codes", "embed_tokens", "audio_embeddings", "out"), 0x1000)
    sizes = {"batch": 1, "codebooks": 2, "text_vocab": 3, "vocab": 4, "width": 8}
    header = {"struct_size": ctypes.sizeof(cuda_kernel.EmbedCodesParams), "abi_version": _library.ABI_VERSION}
    params = cuda_kernel.EmbedCodesParams(**header | sizes | pointers | {field: value})
    with pytest.raises(ValueError, match=message):
        _library.check_status(cuda_kernel._function()(ctypes.byref(params)))


@pytest.mark.parametrize("batch", [0, 5])
def test_opcheck(batch):
    arguments = make_inputs(batch, 8, torch.float32)
    torch.library.opcheck(torch.ops.moss.embed_codes, (*arguments, torch.empty(batch, 8)))


def reference(*arguments) -> None:
    *inputs, out = arguments
    out.copy_(embed_codes_reference(*inputs))


# Not bfloat16: the interpreter truncates where a GPU rounds to nearest.
@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [24, 515])
def test_triton_in_the_interpreter(dtype, width):
    arguments = make_inputs(6, width, dtype, strange=True)
    require_equal("out", run(triton_kernel.embed_codes_triton, arguments), run(reference, arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "width"), [(1, 2560), (128, 2560), (7, 37), (33, 1024)])
def test_implementations_are_bitwise_equal(dtype, batch, width):
    arguments = make_inputs(batch, width, dtype, strange=batch > 2)
    expected = run(reference, arguments)
    for implementation in (reference, triton_kernel.embed_codes_triton, cuda_kernel.embed_codes_cuda):
        require_equal(implementation.__name__, run(implementation, arguments, "cuda"), expected)


@pytest.mark.gpu
def test_replays_in_a_graph():
    arguments = tuple(a.cuda() if torch.is_tensor(a) else a for a in make_inputs(8, 2560, torch.bfloat16))
    out = torch.empty(8, 2560, dtype=torch.bfloat16, device="cuda")
    embed_codes(*arguments, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embed_codes(*arguments, out)
    arguments[1].copy_(arguments[1].flip(0))
    graph.replay()
    require_equal("out", out, embed_codes_reference(*arguments))
