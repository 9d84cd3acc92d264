// The head's product in sample_head: 64 of the V logits, over one of 8 slices of the inputs, for all rows of the batch.
//
// Warp w takes outputs 16 * (w % 4) .. + 15 and half w / 4 of the slice; its weights stay in registers. A logit is
// the sum over k of a half in ascending steps of 16, then of the two halves, then of the slices in ascending order,
// whatever the batch.
#pragma once
#include <cstdint>

#include "device/copy_async.cuh"
#include "device/mma.cuh"

namespace moss::sample_head {

constexpr int kVocab = 1024, kHidden = 2560;
constexpr int kMaxBatch = 128;
constexpr int kThreads = 256;
constexpr int kOutputs = 64, kSlices = 8;
constexpr int kBlocks = kVocab / kOutputs * kSlices;
static_assert(kBlocks >= kMaxBatch);  // block b draws for row b
constexpr int kInputs = kHidden / kSlices;
constexpr int kSteps = kInputs / 2 / 32;  // of 32 inputs, in half a slice
// In shared memory, padded so that no two of 8 neighbouring lanes meet in a bank.
constexpr int kHiddenStride = kInputs + 32;
constexpr int kSumStride = kOutputs + 4;

// What a thread holds of the weights: rows g and g + 8 of its warp's 16.
struct Weights {
  uint4 low[kSteps], high[kSteps];

  // `weight`: bf16 [V, K].
  __device__ __forceinline__ void load(const uint16_t* weight, int group, int slice, int tid) {
    const int warp = tid >> 5, lane = tid & 31;
    const int output = group * kOutputs + (warp & 3) * 16 + (lane >> 2);
    const uint16_t* first = weight + output * kHidden + slice * kInputs + (warp >> 2) * (kSteps * 32) + (lane & 3) * 8;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      low[i] = load_weights(first + i * 32);
      high[i] = load_weights(first + i * 32 + 8 * kHidden);
    }
  }
};

// Starts the copies of the slice of all rows, and of zeros up to a multiple of COLUMNS rows.
template <int COLUMNS>
__device__ __forceinline__ void stage_hidden(uint16_t* staged, const uint16_t* hidden, int64_t row_stride, int batch,
                                             int slice, int tid) {
  constexpr int kPieces = kInputs / 8, kRows = kThreads / kPieces;
  if (tid >= kRows * kPieces) return;
  const int rows = (batch + COLUMNS - 1) / COLUMNS * COLUMNS, piece = tid % kPieces;
  hidden += slice * kInputs + piece * 8;
  for (int row = tid / kPieces; row < rows; row += kRows) {
    const bool wanted = row < batch;
    copy_async(staged + row * kHiddenStride + piece * 8, hidden + (wanted ? row : 0) * row_stride, wanted);
  }
}

// Leaves the slice's sums for COLUMNS rows in sums[column * kSumStride + output]. All threads; ends with a barrier.
template <int COLUMNS>
__device__ __forceinline__ void multiply(float* sums, const Weights& weights, const uint16_t* staged, int tid) {
  const int warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const bool second = warp >= 4;
  const uint16_t* x = staged + g * kHiddenStride + (second ? kSteps * 32 : 0) + t * 8;
  float product[COLUMNS / 8][4] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
      mma(product[j], weights.low[i], weights.high[i],
          *reinterpret_cast<const uint4*>(x + j * 8 * kHiddenStride + i * 32));
  }
  float* own = sums + 2 * t * kSumStride + (warp & 3) * 16 + g;
  const auto each = [&](auto&& visit) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(own[(j * 8 + (e & 1)) * kSumStride + (e >> 1) * 8], product[j][e]);
  };
  if (second) each([](float& sum, float value) { sum = value; });
  __syncthreads();
  if (!second) each([](float& sum, float value) { sum = __fadd_rn(value, sum); });
  __syncthreads();
}

}  // namespace moss::sample_head
