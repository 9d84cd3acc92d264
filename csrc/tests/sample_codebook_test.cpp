// Calls moss_sample_codebook as a server would: bad arguments on any machine, a draw where there is a GPU.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "check.h"

namespace {

constexpr int kBatch = 3, kVocab = 4, kPoolRows = 4;
constexpr int64_t kPad = 4;

// All arguments of one call. Memory that the host and the GPU both see.
struct Call {
  float logits[kBatch * kVocab];
  float temperature[kPoolRows], top_p[kPoolRows];
  int64_t seed[kPoolRows], code[kBatch];
  int32_t row_map[kBatch], top_k[kPoolRows], frame[kPoolRows], status[kBatch];
  uint8_t active[kBatch];
};

SampleCodebookParams params_of(Call& call) {
  auto params = with_header<SampleCodebookParams>();
  params.batch = kBatch;
  params.vocab = kVocab;
  params.pool_rows = kPoolRows;
  params.pad_id = kPad;
  params.logits = call.logits;
  params.logits_dtype = MOSS_FLOAT32;
  params.logits_row_stride = kVocab;
  params.row_map = call.row_map;
  params.active = call.active;
  params.temperature = call.temperature;
  params.top_k = call.top_k;
  params.top_p = call.top_p;
  params.seed = call.seed;
  params.frame = call.frame;
  params.code = call.code;
  params.code_stride = 1;
  params.status = call.status;
  return params;
}

template <typename Spoil>
void check_refused(Call& call, const char* part, Spoil spoil) {
  check_refused("`sample_codebook`", moss_sample_codebook, params_of(call), part, spoil);
}

void test_bad_arguments() {
  static Call call = {};
  CHECK(moss_sample_codebook(nullptr) == MOSS_ERROR_INVALID_ARGUMENT);
  check_refused(call, "`struct_size`", [](auto& params) { params.struct_size = 8; });
  check_refused(call, "`abi_version`", [](auto& params) { params.abi_version = 0; });
  check_refused(call, "`batch`", [](auto& params) { params.batch = -1; });
  check_refused(call, "`vocab`", [](auto& params) { params.vocab = 1; });
  check_refused(call, "`vocab`", [](auto& params) { params.vocab = 4097; });
  check_refused(call, "`logits_dtype`", [](auto& params) { params.logits_dtype = static_cast<MossDtype>(9); });
  check_refused(call, "`logits_row_stride`", [](auto& params) { params.logits_row_stride = kVocab - 1; });
  check_refused(call, "`code_stride`", [](auto& params) { params.code_stride = 0; });
  check_refused(call, "`logits`", [](auto& params) { params.logits = nullptr; });
  check_refused(call, "`logits`", [](auto& params) {
    params.logits = static_cast<const char*>(params.logits) + 1;
  });
  check_refused(call, "`row_map`", [](auto& params) { params.row_map = nullptr; });
  check_refused(call, "`active`", [](auto& params) { params.active = nullptr; });
  check_refused(call, "`temperature`", [](auto& params) { params.temperature = nullptr; });
  check_refused(call, "`seed`", [](auto& params) { params.seed = nullptr; });
  check_refused(call, "`frame`", [](auto& params) { params.frame = nullptr; });
  check_refused(call, "`code`", [](auto& params) { params.code = nullptr; });
  check_refused(call, "`status`", [](auto& params) { params.status = nullptr; });
}

// Pointers of empty tensors are null.
void test_empty() {
  auto params = with_header<SampleCodebookParams>();
  CHECK(moss_sample_codebook(&params) == MOSS_OK);
}

void test_without_gpu() {
  static Call call = {};
  const SampleCodebookParams params = params_of(call);
  CHECK(moss_sample_codebook(&params) == MOSS_ERROR_NO_DEVICE);
  CHECK(message_contains("`sample_codebook`"));
}

// Row 0 is greedy, row 1 draws among four equal codes, row 2 is inactive.
void test_draw() {
  Call* call = nullptr;
  CHECK(cudaMallocManaged(reinterpret_cast<void**>(&call), sizeof(Call), cudaMemAttachGlobal) == cudaSuccess);
  if (call == nullptr) return;
  *call = Call{};
  call->logits[3] = 1.0f;
  for (int row = 0; row < kBatch; ++row) {
    call->row_map[row] = kBatch - 1 - row;
    call->active[row] = row < 2;
    call->code[row] = call->status[row] = -1;
  }
  call->temperature[1] = 1.0f;
  call->seed[1] = 42;

  const SampleCodebookParams params = params_of(*call);
  CHECK(moss_sample_codebook(&params) == MOSS_OK);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(call->code[0] == 3 && call->status[0] == 0);
  // The random word of seed 42, frame 0, channel 0 is 0x9ceaf053: in the third quarter.
  CHECK(call->code[1] == 2 && call->status[1] == 0);
  CHECK(call->code[2] == kPad && call->status[2] == -1);
  CHECK(cudaFree(call) == cudaSuccess);
}

}  // namespace

int main() {
  test_bad_arguments();
  test_empty();
  auto info = with_header<MossDeviceInfo>();
  const MossStatus status = moss_device_query(0, &info);
  if (status == MOSS_ERROR_NO_DEVICE) {
    test_without_gpu();
  } else if (info.has_device_code) {
    test_draw();
  }
  std::printf("sample_codebook: %s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
