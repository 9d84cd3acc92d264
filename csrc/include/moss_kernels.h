/* C ABI of libmoss_kernels.so: CUDA kernels for MOSS-TTS-Local. Plain C, no Torch, no C++ in the interface.
 *
 * Rules that hold for every function
 * - It returns a MossStatus and never throws or exits. After an error, moss_last_error_message() on the same thread says
 *   which argument was wrong, what was expected and what came.
 * - An op takes one Params struct whose first fields are `struct_size` (sizeof of the struct) and `abi_version`
 *   (MOSS_ABI_VERSION); a caller built against another header is refused instead of misread. Zero the struct first, so
 *   that fields which a later version adds in reserved space keep their default.
 * - Pointers of ops point to device memory, strides count elements, dtypes are MossDtype values. The op is enqueued on
 *   `stream` of the current device and does not synchronise. The caller owns all memory, workspaces included; a
 *   workspace belongs to one live graph or stream at a time.
 * - All functions may be called from any thread.
 */
#ifndef MOSS_KERNELS_H
#define MOSS_KERNELS_H

#include <stdint.h>

#if defined(__GNUC__)
#define MOSS_API __attribute__((visibility("default")))
#else
#define MOSS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct of this header changes its layout or a function its meaning. */
#define MOSS_ABI_VERSION 1u

typedef enum MossStatus {
  MOSS_OK = 0,
  MOSS_ERROR_INVALID_ARGUMENT = 1, /* a null pointer, a size, stride, dtype or version that cannot be used */
  MOSS_ERROR_UNSUPPORTED = 2,      /* valid, but this build or this device cannot do it */
  MOSS_ERROR_NO_DEVICE = 3,        /* no CUDA driver, a driver that is too old, or no GPU */
  MOSS_ERROR_CUDA = 4              /* any other error of the CUDA runtime */
} MossStatus;

typedef enum MossDtype { MOSS_FLOAT32 = 0, MOSS_BFLOAT16 = 1, MOSS_FLOAT16 = 2 } MossDtype;

/* Version of the project, as "0.1.0". Never null. */
MOSS_API const char* moss_version(void);

/* MOSS_ABI_VERSION of the header that the library was built with. Compare it with your own once, after loading. */
MOSS_API uint32_t moss_abi_version(void);

/* Name of a status, as "MOSS_ERROR_CUDA"; "unknown status" for any other value. Never null. */
MOSS_API const char* moss_status_string(MossStatus status);

/* Message of the latest error on the calling thread, "" before the first. A success does not clear it. Never null; valid
 * until the next error on this thread. */
MOSS_API const char* moss_last_error_message(void);

typedef struct MossDeviceInfo {
  uint32_t struct_size; /* in: sizeof(MossDeviceInfo) */
  uint32_t abi_version; /* in: MOSS_ABI_VERSION */
  int32_t device_count; /* GPUs that the process sees; set on MOSS_ERROR_NO_DEVICE (to 0) and on a bad ordinal too */
  int32_t compute_capability_major;
  int32_t compute_capability_minor;
  int32_t multiprocessors;
  int64_t l2_bytes;
  int64_t memory_bytes;    /* total, not free */
  int32_t has_device_code; /* 1 if this build holds kernels for the device, else 0: every op would return
                              MOSS_ERROR_UNSUPPORTED; see CMAKE_CUDA_ARCHITECTURES */
  int32_t reserved;
} MossDeviceInfo;

/* Describe a GPU.
 *
 * device: CUDA ordinal, 0 .. device_count - 1. The thread's current device is the same before and after; the primary
 *   context of `device` is created if it did not exist.
 * info: filled on MOSS_OK.
 * Errors: MOSS_ERROR_INVALID_ARGUMENT (null, struct_size, abi_version, ordinal), MOSS_ERROR_NO_DEVICE, MOSS_ERROR_CUDA.
 */
MOSS_API MossStatus moss_device_query(int32_t device, MossDeviceInfo* info);

/* ---- sample_codebook ------------------------------------------------------------------------------------------- */

/* One draw per batch row. Sampling parameters lie in pool rows that `row_map` selects; greedy, seeded, penalised and
 * plain rows may be mixed in one call. The draw uses one Philox4x32-10 word, a function of (seed, frame, channel) alone,
 * and exact integer weights: the code depends on nothing but the row's logits and parameters. */
typedef struct SampleCodebookParams {
  uint32_t struct_size; /* sizeof(SampleCodebookParams) */
  uint32_t abi_version; /* MOSS_ABI_VERSION */
  int32_t batch;        /* B, 0 .. 65535 */
  int32_t vocab;        /* V, 2 .. 4096 */
  int32_t pool_rows;    /* S+1: rows of the pool tensors; row_map values must be below (not checked on the device) */
  int32_t codebooks;    /* Q: codebooks in `seen` */
  int32_t channel;      /* random channel: 0 for the stop head, q+1 for codebook q */
  int32_t codebook;     /* codebook of `seen`, 0 .. Q-1 */
  int64_t pad_id;       /* code of inactive rows */
  const void* logits;   /* [B, V] of `logits_dtype`, rows contiguous, aligned to the element */
  MossDtype logits_dtype;
  int32_t dependent_launch;   /* 1: launch with programmatic stream serialization (the kernel waits before it reads) */
  int64_t logits_row_stride;  /* elements, >= V if B > 1 */
  const int32_t* row_map;     /* [B] pool row of each batch row */
  const uint8_t* active;      /* [B] 0: the row gets pad_id and nothing else of it is written */
  const float* temperature;   /* [S+1] not >= 1e-5: greedy */
  const int32_t* top_k;       /* [S+1] outside 1 .. V-1: off */
  const float* top_p;         /* [S+1] outside (0, 1): off */
  const float* repetition_penalty; /* [S+1] not > 0: 1; null: no penalty */
  const int64_t* seed;             /* [S+1] 0 .. 2^63-1 */
  const int32_t* frame;            /* [S+1] */
  int32_t* seen;          /* [S+1, Q, ceil(V/32)] bit v & 31 of word v >> 5: code v was generated; updated; null: none */
  int64_t* code;          /* [B], aligned to 8 bytes, written */
  int64_t code_stride;    /* elements, >= 1 if B > 1 */
  int32_t* status;        /* [B] written for active rows: bit 0 a NaN or +inf came, bit 1 no candidate (code 0) */
  const int64_t* random_words; /* [B] 0 .. 2^32-1, used in place of the Philox words (tests); null: none */
  void* stream;                /* cudaStream_t */
} SampleCodebookParams;

/* Errors: MOSS_ERROR_INVALID_ARGUMENT (null pointer, size, stride, alignment, dtype, version), MOSS_ERROR_UNSUPPORTED (no
 * code for this device), MOSS_ERROR_NO_DEVICE, MOSS_ERROR_CUDA. */
MOSS_API MossStatus moss_sample_codebook(const SampleCodebookParams* params);

#ifdef __cplusplus
}
#endif

#endif
