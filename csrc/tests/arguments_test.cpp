// What the products, ring_attention and local_frame_decode refuse, on any machine; valid arguments where there is no GPU.
#include "check.h"

namespace {

// Where all tensors lie: refused calls touch none.
alignas(256) char memory[256];
template <typename T>
T* aligned(size_t offset = 0) {
  return reinterpret_cast<T*>(memory + offset);
}

// Valid arguments pass all checks, which the lack of a GPU shows.
template <typename Params>
void check_accepted(MossStatus (*call)(const Params*), Params params) {
  auto info = with_header<MossDeviceInfo>();
  if (moss_device_query(0, &info) != MOSS_ERROR_NO_DEVICE) return;
  CHECK(call(&params) == MOSS_ERROR_NO_DEVICE);
}

template <typename Params>
void test_header(const char* op, MossStatus (*call)(const Params*), Params params) {
  CHECK(call(nullptr) == MOSS_ERROR_INVALID_ARGUMENT);
  check_refused(op, call, params, "`struct_size`", [](auto& spoiled) { --spoiled.struct_size; });
  check_refused(op, call, params, "`abi_version`", [](auto& spoiled) { ++spoiled.abi_version; });
}

void test_prefill_linear() {
  auto params = with_header<PrefillLinearParams>();
  CHECK(moss_prefill_linear(&params) == MOSS_OK);
  params.mode = MOSS_LINEAR_ADD;
  params.rows = 3;
  params.outputs = 48;
  params.inputs = 256;
  params.slices = 2;
  params.x = params.weight = params.out = memory;
  test_header("`prefill_linear`", moss_prefill_linear, params);
  const auto refused = [&](const char* part, auto spoil) {
    check_refused("`prefill_linear`", moss_prefill_linear, params, part, spoil);
  };
  refused("`mode`", [](auto& spoiled) { spoiled.mode = static_cast<LinearMode>(4); });
  refused("`rows` must be 0 .. 1073741824, got -1", [](auto& spoiled) { spoiled.rows = -1; });
  refused("`rows`", [](auto& spoiled) { spoiled.rows = INT32_MAX; });
  refused("`outputs`", [](auto& spoiled) { spoiled.outputs = 0; });
  refused("`outputs`", [](auto& spoiled) { spoiled.outputs = 40; });
  refused("`outputs`", [](auto& spoiled) { spoiled.outputs = INT32_MAX / 16 * 16; });
  refused("`inputs`", [](auto& spoiled) { spoiled.inputs = 0; });
  refused("`inputs` of 128, got 48 and 192", [](auto& spoiled) { spoiled.inputs = 192; });
  refused("`slices` must be 1 .. 64, got 0", [](auto& spoiled) { spoiled.slices = 0; });
  refused("`slices` must be 1 .. 1, got 2", [](auto& spoiled) { spoiled.mode = MOSS_LINEAR_GATE_UP; });
  refused("`x` must not be null", [](auto& spoiled) { spoiled.x = nullptr; });
  refused("`weight` must be aligned to 16", [](auto& spoiled) { spoiled.weight = aligned<void>(8); });
  refused("`out` must be aligned to 16", [](auto& spoiled) { spoiled.out = aligned<void>(8); });
  check_accepted(moss_prefill_linear, params);
}

void test_backbone_linear() {
  auto params = with_header<BackboneLinearParams>();
  CHECK(moss_backbone_linear(&params) == MOSS_OK);
  params.mode = MOSS_LINEAR_PARTIAL;
  params.rows = 128;
  params.outputs = 48;
  params.inputs = 256;
  params.slices = 2;
  params.x = params.weight = params.out = memory;
  test_header("`backbone_linear`", moss_backbone_linear, params);
  const auto refused = [&](const char* part, auto spoil) {
    check_refused("`backbone_linear`", moss_backbone_linear, params, part, spoil);
  };
  refused("`mode` must be 0 .. 2, got 3", [](auto& spoiled) { spoiled.mode = MOSS_LINEAR_ADD; });
  refused("`rows` must be 0 .. 128, got 129", [](auto& spoiled) { spoiled.rows = 129; });
  refused("`inputs` of 128, got 48 and 192", [](auto& spoiled) { spoiled.inputs = 192; });
  refused("`slices` must be 1 .. 1, got 2", [](auto& spoiled) { spoiled.mode = MOSS_LINEAR_WHOLE; });
  refused("`x` must be aligned to 16", [](auto& spoiled) { spoiled.x = aligned<void>(8); });
  check_accepted(moss_backbone_linear, params);
}

void test_codec_linear() {
  auto params = with_header<CodecLinearParams>();
  CHECK(moss_codec_linear(&params) == MOSS_OK);
  params.rows = 3;
  params.outputs = 6;
  params.inputs = 64;
  params.x_dtype = params.out_dtype = MOSS_FLOAT32;
  params.x = params.weight = params.norm_weight = params.scale = params.out = memory;
  params.norm_sums = aligned<float>();
  test_header("`codec_linear`", moss_codec_linear, params);
  const auto refused = [&](const char* part, auto spoil) {
    check_refused("`codec_linear`", moss_codec_linear, params, part, spoil);
  };
  refused("`rows` must be 0 .. 32, got 33", [](auto& spoiled) { spoiled.rows = 33; });
  refused("`outputs`", [](auto& spoiled) { spoiled.outputs = 7; });
  refused("`outputs`", [](auto& spoiled) { spoiled.outputs = INT32_MAX - 1; });
  refused("`inputs`", [](auto& spoiled) { spoiled.inputs = 48; });
  refused("`x_dtype`", [](auto& spoiled) { spoiled.x_dtype = static_cast<MossDtype>(9); });
  refused("float32 with a norm", [](auto& spoiled) { spoiled.norm_weight = nullptr; });
  refused("`out_dtype`", [](auto& spoiled) { spoiled.out_dtype = MOSS_FLOAT16; });
  refused("`x`", [](auto& spoiled) { spoiled.x = aligned<void>(8); });
  refused("`weight`", [](auto& spoiled) { spoiled.weight = nullptr; });
  refused("`norm_weight`", [](auto& spoiled) { spoiled.norm_weight = aligned<void>(8); });
  refused("`norm_sums`", [](auto& spoiled) { spoiled.norm_sums = nullptr; });
  refused("`scale`", [](auto& spoiled) { spoiled.scale = aligned<void>(2); });
  refused("`out`", [](auto& spoiled) { spoiled.out = aligned<void>(4); });
  check_accepted(moss_codec_linear, params);

  params.x_dtype = MOSS_BFLOAT16;
  params.norm_weight = params.norm_sums = nullptr;
  params.outputs = 8;
  params.inputs = 256;
  params.tile_rows = 64;
  params.tile_columns = 24;
  params.slices = 4;
  params.out = aligned<void>(16);
  refused("with `cos_sin` there must be tiles of 128 or 192", [](auto& spoiled) { spoiled.cos_sin = aligned<float>(); });
  refused("`slices` must be 1 .. 8, got 0", [](auto& spoiled) { spoiled.slices = 0; });
  refused("`inputs` of 256, got 8 and 320", [](auto& spoiled) { spoiled.inputs = 320; });
  refused("`outputs` a multiple of 8", [](auto& spoiled) { spoiled.outputs = 12; });
  refused("`scale` must be aligned to 16", [](auto& spoiled) { spoiled.scale = aligned<void>(4); });
  refused("`out` must be aligned to 16", [](auto& spoiled) { spoiled.out = aligned<void>(8); });
  refused("no tile of 65 rows", [](auto& spoiled) { spoiled.tile_rows = 65; });
  params.tile_columns = 96;
  refused("no tile of 64 rows, 96 outputs and 4 slices", [](auto&) {});
  params.slices = 1;
  refused("`out_dtype` must be bfloat16", [](auto&) {});
}

void test_ring_attention() {
  auto params = with_header<RingAttentionParams>();
  CHECK(moss_ring_attention(&params) == MOSS_OK);
  params.batch = 2;
  params.tokens = 3;
  params.heads = 2;
  params.head_dim = 64;
  params.capacity = params.window = 16;
  params.ring_slots = 3;
  params.qkv = params.ring_k = params.ring_v = params.out = memory;
  params.cos_sin = aligned<float>();
  params.slots = params.valid = aligned<int32_t>();
  params.offset = aligned<int64_t>();
  test_header("`ring_attention`", moss_ring_attention, params);
  const auto refused = [&](const char* part, auto spoil) {
    check_refused("`ring_attention`", moss_ring_attention, params, part, spoil);
  };
  refused("`batch`", [](auto& spoiled) { spoiled.batch = 65536; });
  refused("`tokens` must be >= 0", [](auto& spoiled) { spoiled.tokens = -1; });
  refused("`batch * tokens` must be 1 .. 1073741824",
          [](auto& spoiled) { spoiled.tokens = INT32_MAX, spoiled.cos_sin = nullptr; });
  refused("`ring_slots * heads * capacity` must be 1 .. 1073741824",
          [](auto& spoiled) { spoiled.ring_slots = INT32_MAX, spoiled.cos_sin = nullptr; });
  refused("`cos_sin` must be null for 513 tokens of 2 rows", [](auto& spoiled) { spoiled.tokens = 513; });
  refused("`qkv_slices` must be 0 for 3 tokens of 2 rows, got 1", [](auto& spoiled) { spoiled.qkv_slices = 1; });
  params.batch = 200;
  params.tokens = 1;
  refused("`qkv_slices` must be 0 for 1 tokens of 200 rows, got 5", [](auto& spoiled) { spoiled.qkv_slices = 5; });
  refused("`qkv_slices` must be 0 for 1 tokens of 200 rows, got -1", [](auto& spoiled) { spoiled.qkv_slices = -1; });
  refused("`heads`", [](auto& spoiled) { spoiled.heads = 0; });
  refused("`head_dim`", [](auto& spoiled) { spoiled.head_dim = 128; });
  refused("`capacity` must be 1 .. 16777216, got 0", [](auto& spoiled) { spoiled.capacity = 0; });
  refused("`capacity`", [](auto& spoiled) { spoiled.capacity = INT32_MAX; });
  refused("`window` must be 1 .. 16, got 17", [](auto& spoiled) { spoiled.window = 17; });
  refused("`ring_slots`", [](auto& spoiled) { spoiled.ring_slots = 0; });
  refused("`dependent_launch` must be 0 .. 2, got 3", [](auto& spoiled) { spoiled.dependent_launch = 3; });
  refused("`qkv`", [](auto& spoiled) { spoiled.qkv = aligned<void>(8); });
  refused("`cos_sin`", [](auto& spoiled) { spoiled.cos_sin = aligned<float>(8); });
  refused("`ring_v`", [](auto& spoiled) { spoiled.ring_v = aligned<void>(8); });
  refused("`offset`", [](auto& spoiled) { spoiled.offset = aligned<int64_t>(4); });
  refused("`out`", [](auto& spoiled) { spoiled.out = nullptr; });
  check_accepted(moss_ring_attention, params);
}

LocalFrameDecodeParams local_frame_params() {
  auto params = with_header<LocalFrameDecodeParams>();
  params.model = MOSS_LOCAL_TINY;
  params.batch = 5;
  params.pool_rows = 6;
  params.slot_id = 3;
  params.text_rows = 4;
  params.packed = params.ln_1_weight = params.ln_1_bias = params.ln_2_weight = params.ln_2_bias = memory;
  params.ln_f_weight = params.ln_f_bias = params.c_attn_bias = params.c_proj_bias = params.fc_in_bias = memory;
  params.fc_out_bias = params.stop_head = params.audio_embeddings = params.embed_tokens = params.hidden = memory;
  params.rope = params.temperature = params.top_p = params.repetition_penalty = aligned<float>();
  params.text_temperature = params.text_top_p = aligned<float>();
  params.row_map = params.top_k = params.text_top_k = aligned<int32_t>();
  params.frame = params.seen = params.status = aligned<int32_t>();
  params.active = params.continues = aligned<uint8_t>();
  params.seed = params.codes = aligned<int64_t>();
  params.feedback = params.workspace = memory;
  return params;
}

void test_local_frame_decode() {
  const LocalFrameDecodeParams params = local_frame_params();
  test_header("`local_frame_decode`", moss_local_frame_decode, params);
  const auto refused = [&](const char* part, auto spoil) {
    check_refused("`local_frame_decode`", moss_local_frame_decode, params, part, spoil);
  };
  refused("`model`", [](auto& spoiled) { spoiled.model = static_cast<MossLocalModel>(2); });
  refused("`batch` must be 1 .. 128, got 0", [](auto& spoiled) { spoiled.batch = 0; });
  refused("`batch`", [](auto& spoiled) { spoiled.batch = 129; });
  refused("`pool_rows`", [](auto& spoiled) { spoiled.pool_rows = 0; });
  refused("`slot_id` and `pad_token_id` must be 0 .. 3, got 4 and 0", [](auto& spoiled) { spoiled.slot_id = 4; });
  refused("`packed`", [](auto& spoiled) { spoiled.packed = aligned<void>(64); });
  refused("`workspace`", [](auto& spoiled) { spoiled.workspace = aligned<void>(128); });
  refused("`seed`", [](auto& spoiled) { spoiled.seed = nullptr; });
  refused("`qkv_table`", [](auto& spoiled) { spoiled.qkv_table = aligned<void>(8); });
  refused("`teacher_codes`", [](auto& spoiled) { spoiled.teacher_codes = aligned<int64_t>(4); });
  refused("`stop_logits`", [](auto& spoiled) { spoiled.stop_logits = aligned<float>(2); });
  refused("`audio_logits`", [](auto& spoiled) { spoiled.audio_logits = aligned<float>(8); });
  refused("`hidden_out`", [](auto& spoiled) { spoiled.hidden_out = aligned<void>(2); });
  check_accepted(moss_local_frame_decode, params);
  CHECK(moss_local_qkv_table(&params, nullptr) == MOSS_ERROR_INVALID_ARGUMENT);
  CHECK(message_contains("`table` must not be null"));
}

void test_local_frame_pack() {
  auto params = with_header<LocalFramePackParams>();
  params.model = MOSS_LOCAL_TINY;
  params.c_attn = params.c_proj = params.fc_in = params.fc_out = params.audio_embeddings = params.packed = memory;
  test_header("`local_frame_pack`", moss_local_frame_pack, params);
  const auto refused = [&](const char* part, auto spoil) {
    check_refused("`local_frame_pack`", moss_local_frame_pack, params, part, spoil);
  };
  refused("`model`", [](auto& spoiled) { spoiled.model = static_cast<MossLocalModel>(2); });
  refused("`fc_in` must not be null", [](auto& spoiled) { spoiled.fc_in = nullptr; });
  refused("`packed` must be aligned to 128", [](auto& spoiled) { spoiled.packed = aligned<void>(64); });
  CHECK(moss_local_frame_packed_bytes(static_cast<MossLocalModel>(2)) == 0);
  CHECK(moss_local_frame_workspace_bytes(static_cast<MossLocalModel>(2)) == 0);
}

}  // namespace

int main() {
  test_prefill_linear();
  test_backbone_linear();
  test_codec_linear();
  test_ring_attention();
  test_local_frame_decode();
  test_local_frame_pack();
  std::printf("arguments: %s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
