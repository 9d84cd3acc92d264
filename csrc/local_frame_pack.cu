// moss_local_frame_pack: weights in the order in which local_frame_decode streams them.
#include <cuda_runtime.h>

#include "checks.h"
#include "device/local_frame.cuh"

namespace moss::local_frame {
namespace {

constexpr char kOp[] = "local_frame_pack";

// One unit per block: [rows, K] slice of `weight`, whose rows begin at `first_row`, to pieces of [k / 8][rows][8].
template <class P>
__global__ void pack_kernel(const bf16* weight, int first_row, bf16* packed) {
  const int group = blockIdx.x % P::kGroups, slice = blockIdx.x / P::kGroups;
  const bf16* source =
      weight + (static_cast<int64_t>(first_row) + group * P::kRows) * P::kInputs + slice * P::kK16 * 16;
  for (int i = threadIdx.x; i < P::kRows * P::kK16 * 2; i += blockDim.x) {
    const int row = i % P::kRows, chunk = i / P::kRows;
    constexpr int kPieceVectors = P::kPieceElements / 8;
    const int64_t piece = static_cast<int64_t>(i / kPieceVectors) * P::kUnits + blockIdx.x;
    reinterpret_cast<uint4*>(packed)[piece * kPieceVectors + i % kPieceVectors] =
        *reinterpret_cast<const uint4*>(source + static_cast<int64_t>(row) * P::kInputs + chunk * 8);
  }
}

template <class P>
void pack(const void* weight, int64_t first_row, void* packed, int64_t offset, cudaStream_t stream) {
  pack_kernel<P><<<P::kUnits, 256, 0, stream>>>(static_cast<const bf16*>(weight), static_cast<int>(first_row),
                                                static_cast<bf16*>(packed) + offset);
}

template <class Dims>
MossStatus pack_model(const LocalFramePackParams& params) {
  auto* stream = static_cast<cudaStream_t>(params.stream);
  using Pack = Packed<Dims>;
  pack<typename Dims::KeyValue>(params.c_attn, Dims::kHidden, params.packed, Pack::kKeyValue, stream);
  pack<typename Dims::Query>(params.c_attn, 0, params.packed, Pack::kQuery, stream);
  pack<typename Dims::Projection>(params.c_proj, 0, params.packed, Pack::kProjection, stream);
  pack<typename Dims::InnerIn>(params.fc_in, 0, params.packed, Pack::kInnerIn, stream);
  pack<typename Dims::InnerOut>(params.fc_out, 0, params.packed, Pack::kInnerOut, stream);
  for (int q = 0; q < kCodebooks; ++q)
    pack<typename Dims::Head>(params.audio_embeddings, int64_t{q} * Dims::kVocab, params.packed,
                              Pack::kHead + q * Dims::Head::kElements, stream);
  return check_cuda(cudaGetLastError(), kOp, "kernel launch");
}

}  // namespace
}  // namespace moss::local_frame

extern "C" {

int64_t moss_local_frame_packed_bytes(MossLocalModel model) {
  using namespace moss::local_frame;
  if (model == MOSS_LOCAL_FULL) return Packed<FullDims>::kEnd * 2;
  return model == MOSS_LOCAL_TINY ? Packed<TinyDims>::kEnd * 2 : 0;
}

int64_t moss_local_frame_workspace_bytes(MossLocalModel model) {
  using namespace moss::local_frame;
  if (model == MOSS_LOCAL_FULL) return Workspace<FullDims>::kEnd;
  return model == MOSS_LOCAL_TINY ? Workspace<TinyDims>::kEnd : 0;
}

MossStatus moss_local_frame_pack(const LocalFramePackParams* params) {
  using namespace moss;
  using namespace moss::local_frame;
  MossStatus status = check_params(kOp, params);
  if (status != MOSS_OK) return status;
  if (moss_local_frame_packed_bytes(params->model) == 0)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `model` must be a MossLocalModel, got %d", kOp,
                     static_cast<int>(params->model));
  const void* pointers[] = {params->c_attn, params->c_proj,           params->fc_in,
                            params->fc_out, params->audio_embeddings, params->packed};
  const char* names[] = {"c_attn", "c_proj", "fc_in", "fc_out", "audio_embeddings", "packed"};
  for (int i = 0; i < 6; ++i)
    if (status == MOSS_OK) status = check_pointer(kOp, names[i], pointers[i], i < 5 ? 16 : 128);
  if (status != MOSS_OK) return status;
  return params->model == MOSS_LOCAL_FULL ? pack_model<FullDims>(*params) : pack_model<TinyDims>(*params);
}

}  // extern "C"
