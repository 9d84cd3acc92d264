// What the parts of local_frame_decode share: dimensions, how each matrix product is cut into units, the layout of
// packed weights and of the workspace.
//
// A frame is a chain of phases. Row phases (draw, attention, LayerNorm) work on one batch row per block; product phases
// stream weights. Each product is cut into kUnits units of (rows of the weight matrix) x (a slice of K); a block takes
// the units blockIdx.x, blockIdx.x + gridDim.x, ... The cut, and with it the order of every sum, depends on the
// dimensions alone: not on the batch and not on the number of blocks. Slices of K leave fp32 partial sums that the next
// row phase adds in order of the slice.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "moss_kernels.h"

namespace moss::local_frame {

using bf16 = __nv_bfloat16;

// A product W [groups * kRows, slices * kK16 * 16] x^T, cut into kGroups * kSlices units. Weights are packed as
// [piece][unit][k / 8][kRows][8], with kPieceK16 steps of 16 in a piece: a stage, which is a part of a piece, is one
// contiguous copy, and blocks that keep step read one piece of memory, spread evenly over the channels.
template <int ROWS, int K16, int GROUPS, int SLICES, int STAGE_K16, int PIECE_K16>
struct Product {
  static constexpr int kRows = ROWS, kK16 = K16, kGroups = GROUPS, kSlices = SLICES;
  static constexpr int kUnits = GROUPS * SLICES;
  static constexpr int kStageK16 = STAGE_K16;  // steps of 16 in a stage, of weights and of activations, before scaling
  static constexpr int kPieceK16 = PIECE_K16;
  static constexpr int kPieceElements = ROWS * PIECE_K16 * 16;
  static constexpr int kTiles = (ROWS + 63) / 64;
  static constexpr int kOutputs = ROWS * GROUPS;
  static constexpr int kInputs = K16 * 16 * SLICES;
  static constexpr int64_t kElements = static_cast<int64_t>(kOutputs) * kInputs;
  static_assert(K16 % STAGE_K16 == 0 && K16 % PIECE_K16 == 0 && ROWS % 4 == 0);
};

// MOSS-TTS-Local v1.5.
struct FullDims {
  static constexpr int kSmallBatchScale = 2;
  static constexpr int kHidden = 2560, kInner = 9728, kHeads = 32, kHeadDim = 80, kVocab = 1024;
  using KeyValue = Product<40, 160, 128, 1, 5, 20>;
  using Query = Product<20, 160, 128, 1, 5, 20>;
  using Projection = Product<80, 40, 32, 4, 4, 8>;
  using InnerIn = Product<76, 160, 128, 1, 4, 8>;
  using InnerOut = Product<160, 76, 16, 8, 2, 4>;
  using Head = Product<64, 20, 16, 8, 5, 20>;
};

// A model small enough for the memory and race checkers.
struct TinyDims {
  static constexpr int kSmallBatchScale = 1;
  static constexpr int kHidden = 256, kInner = 512, kHeads = 4, kHeadDim = 64, kVocab = 128;
  using KeyValue = Product<32, 16, 16, 1, 4, 4>;
  using Query = Product<16, 16, 16, 1, 4, 4>;
  using Projection = Product<64, 4, 4, 4, 4, 4>;
  using InnerIn = Product<32, 16, 16, 1, 4, 4>;
  using InnerOut = Product<64, 8, 4, 4, 2, 2>;
  using Head = Product<32, 4, 4, 4, 4, 4>;
};

constexpr int kMaxBatch = 128;
constexpr int kMaxRows = 8;  // rows of one block: a launch has at least batch / 8 blocks
constexpr int kCodebooks = 12;
static_assert(kCodebooks % 2 == 0);  // the last position's partial sums carry a tag of 1: see Workspace
constexpr int kMaxVocab = 1024;
constexpr int kComputeThreads = 256;
constexpr int kSharedBytes = 232448;  // most that a block may have
constexpr int kStageBytes = 10240;    // at most, of a weight stage before scaling
constexpr int kMaxParts = 4;          // blocks that share the attention of one row
constexpr int kWarps = kComputeThreads / 32;

// Places of the counters, in words from the start of the workspace. A phase that only some blocks wait for has counters
// of its own, so that these wait for no others.
constexpr int kArrivals = 0;
constexpr int kSliceArrivals = 8;  // of fc_in, for each slice of fc_out
constexpr int kMaxSlices = 8;
constexpr int kPartArrivals = 16;  // of the attention, by part
constexpr int kExits = 32;

// How readers of partial sums learn that they are there. Up to 16 padded rows they poll the sums themselves, by their
// tags; for 32 a counter that orders nothing says when to begin with that; beyond, they wait for a counter that orders
// what was stored before. Each was measured to be the fastest.
template <int COLUMNS>
constexpr bool kCountsPartial = COLUMNS > 16;
template <int COLUMNS>
constexpr bool kChecksTags = COLUMNS <= 32;

// Element offsets of the matrices in the packed weights.
template <class Dims>
struct Packed {
  static constexpr int64_t kKeyValue = 0;
  static constexpr int64_t kQuery = kKeyValue + Dims::KeyValue::kElements;
  static constexpr int64_t kProjection = kQuery + Dims::Query::kElements;
  static constexpr int64_t kInnerIn = kProjection + Dims::Projection::kElements;
  static constexpr int64_t kInnerOut = kInnerIn + Dims::InnerIn::kElements;
  static constexpr int64_t kHead = kInnerOut + Dims::InnerOut::kElements;
  static constexpr int64_t kEnd = kHead + kCodebooks * Dims::Head::kElements;
};

// Byte offsets in the workspace, which begins with the counters (zero between frames). `columns` is the batch rounded
// up to what the tensor cores take. Activations that feed a product are packed as [k / 8][columns][8]
// bf16; partial sums are [slice][columns][outputs] fp32, tagged (device/tagged.cuh) with the lowest bit of their
// position: whatever the batch, the last position leaves a tag of 1, which bytes of 0xff stand for before the first
// frame. So a workspace may serve batches of different `columns`, whose sums lie elsewhere, in any order.
template <class Dims>
struct Workspace {
  static constexpr int64_t kStopLogits = 256;
  static constexpr int64_t kResidual = kStopLogits + int64_t{kMaxBatch} * 2 * 4;
  static constexpr int64_t kCache = kResidual + int64_t{kMaxBatch} * Dims::kHidden * 4;
  static constexpr int64_t kQkv = kCache + int64_t{kMaxBatch} * kCodebooks * Dims::kHidden * 2 * 2;
  static constexpr int64_t kNormed = kQkv + int64_t{kMaxBatch} * Dims::kHidden * 3 * 2;
  static constexpr int64_t kAttention = kNormed + int64_t{kMaxBatch} * Dims::kHidden * 2;
  static constexpr int64_t kInner = kAttention + int64_t{kMaxBatch} * Dims::kHidden * 2;
  static constexpr int64_t kProjected = kInner + int64_t{kMaxBatch} * Dims::kInner * 2;
  static constexpr int64_t kInnerSum = kProjected + int64_t{kMaxBatch} * Dims::Projection::kSlices * Dims::kHidden * 4;
  static constexpr int64_t kLogits = kInnerSum + int64_t{kMaxBatch} * Dims::InnerOut::kSlices * Dims::kHidden * 4;
  static constexpr int64_t kEnd = kLogits + int64_t{kMaxBatch} * Dims::Head::kSlices * Dims::kVocab * 4;
};

}  // namespace moss::local_frame
