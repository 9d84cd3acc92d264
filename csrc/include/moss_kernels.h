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
 * - A dependent launch has programmatic stream serialization: it may start early, and waits before it reads.
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

/* ---- sample_codebook ---- */

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
  int32_t dependent_launch;   /* 1: dependent launch (reads before the wait are repeated) */
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

/* ---- sample_head ---- */

/* One draw per batch row as sample_codebook makes it from the logits hidden x weight^T, rounded to bfloat16, in one
 * launch that does not write them out. A logit's sum runs in an order that depends on nothing. */
typedef struct SampleHeadParams {
  uint32_t struct_size;      /* sizeof(SampleHeadParams) */
  uint32_t abi_version;      /* MOSS_ABI_VERSION */
  int32_t inputs;            /* K = 2560 */
  int32_t reserved;          /* 0 */
  const void* hidden;        /* [B, K] bf16, aligned to 16 bytes */
  int64_t hidden_row_stride; /* elements, a multiple of 8, >= K if B > 1 */
  const void* weight;        /* [V, K] bf16, aligned to 16 bytes; no kernel in flight writes it */
  void* workspace;           /* MOSS_SAMPLE_HEAD_WORKSPACE_BYTES, aligned to 16; all 0xff before the first launch, and
                                left so by each */
  SampleCodebookParams draw; /* as for sample_codebook, header included, with batch 0 .. 128 and vocab 1024; its logits,
                                their dtype and stride are not read; its stream is the stream */
} SampleHeadParams;

#define MOSS_SAMPLE_HEAD_WORKSPACE_BYTES 4194304

/* Errors: as moss_sample_codebook; MOSS_ERROR_UNSUPPORTED also for another `inputs` or `vocab`. */
MOSS_API MossStatus moss_sample_head(const SampleHeadParams* params);

/* ---- embed_codes ---- */

/* The next input of the backbone: out[b] = embed_tokens[text_ids[b]] + audio_embeddings[0][codes[b][0]] + ... + the row of
 * codebook Q-1, added one after the other, each sum rounded to `dtype`. An id outside its table is never looked up and
 * adds nothing, as the pad code. */
typedef struct EmbedCodesParams {
  uint32_t struct_size; /* sizeof(EmbedCodesParams) */
  uint32_t abi_version; /* MOSS_ABI_VERSION */
  int32_t batch;        /* B, 0 .. 65535 */
  int32_t codebooks;    /* Q, >= 0 */
  int64_t text_vocab;   /* N, >= 1 */
  int64_t vocab;        /* V, >= 1 */
  int64_t width;        /* H, >= 1 */
  int64_t pad_id;       /* code that adds nothing */
  MossDtype dtype;      /* of the tables and the output */
  int32_t dependent_launch;     /* 1: dependent launch */
  const int64_t* text_ids;      /* [B] */
  int64_t text_ids_stride;      /* elements */
  const int64_t* codes;         /* [B, Q], rows contiguous */
  int64_t codes_row_stride;     /* elements */
  const void* embed_tokens;     /* [N, H] contiguous; this and the next two are aligned to 16 bytes */
  const void* audio_embeddings; /* [Q, V, H] contiguous */
  void* out;                    /* [B, H] contiguous, written */
  void* stream;                 /* cudaStream_t */
} EmbedCodesParams;

/* Errors: as moss_sample_codebook. */
MOSS_API MossStatus moss_embed_codes(const EmbedCodesParams* params);

/* ---- local_rope_attention ---- */

/* Attention of one position of the local transformer over positions 0 .. position of its own frame. The new q, k and v
 * come either from `qkv` (q and k are rotated here: interleaved RoPE, rounded to `dtype`) or, if `qkv` is null, from
 * `table` by the code drawn at the position before (q and k rotated already); then `residual` gets that code's embedding.
 * k and v are stored at `position`; later positions are never read. Scores, softmax and the weighted sum are fp32. In the
 * table form a row whose code is outside 0 .. V-1 stores nothing and its outputs are 0. All tensors are contiguous and
 * aligned to 16 bytes, `codes` to 8. */
typedef struct LocalRopeAttentionParams {
  uint32_t struct_size; /* sizeof(LocalRopeAttentionParams) */
  uint32_t abi_version; /* MOSS_ABI_VERSION */
  int32_t batch;        /* B, 0 .. 65535 */
  int32_t heads;        /* 1 .. 65535 */
  int32_t head_dim;     /* D, a multiple of 4 in 16 .. 128 */
  int32_t positions;    /* P, 1 .. 32 */
  int32_t position;     /* 0 .. P-1; from 1 in the table form */
  MossDtype dtype;      /* of all tensors but `codes` */
  const void* qkv;      /* [B, 3*heads*D] all of q, then k, then v; null: table form */
  const void* cos;      /* [P, D/2] null in the table form, as `sin` */
  const void* sin;      /* [P, D/2] */
  const int64_t* codes; /* [B] this, `table`, `audio_embeddings` and `residual` are null unless in the table form */
  int64_t codes_stride; /* elements */
  int64_t vocab;        /* V; 0 unless in the table form */
  const void* table;    /* [P-1, V, 3*heads*D] */
  const void* audio_embeddings; /* [>= P-1, V, heads*D] */
  void* residual;               /* [B, heads*D] written */
  void* k_cache;                /* [B, P, heads, D] read and written */
  void* v_cache;                /* [B, P, heads, D] read and written */
  void* out;                    /* [B, heads*D] written */
  int32_t dependent_launch;     /* 1: dependent launch */
  int32_t reserved;
  void* stream; /* cudaStream_t */
} LocalRopeAttentionParams;

/* Errors: as moss_sample_codebook. */
MOSS_API MossStatus moss_local_rope_attention(const LocalRopeAttentionParams* params);

/* ---- local_frame_decode ---- */

/* The dimensions that the persistent kernel is built for. Each fixes hidden, inner, heads, head_dim and vocab:
 * MOSS_LOCAL_FULL: 2560, 9728, 32, 80, 1024 (MOSS-TTS-Local v1.5); MOSS_LOCAL_TINY: 256, 512, 4, 64, 128 (for checkers).
 * Both have 12 codebooks. */
typedef enum MossLocalModel { MOSS_LOCAL_FULL = 0, MOSS_LOCAL_TINY = 1 } MossLocalModel;

/* Weights of the block and the heads, bf16, row-major [outputs, inputs], on the device. */
typedef struct LocalFramePackParams {
  uint32_t struct_size;
  uint32_t abi_version;
  MossLocalModel model;
  int32_t reserved;
  const void* c_attn;           /* [3*hidden, hidden] rows of q, k, v */
  const void* c_proj;           /* [hidden, hidden] */
  const void* fc_in;            /* [inner, hidden] */
  const void* fc_out;           /* [hidden, inner] */
  const void* audio_embeddings; /* [12, vocab, hidden], the tied heads */
  void* packed;                 /* moss_local_frame_packed_bytes, aligned to 128 bytes, written */
  void* stream;
} LocalFramePackParams;

/* Bytes of the packed weights, and of a workspace for batches up to 128; 0 for an unknown model. */
MOSS_API int64_t moss_local_frame_packed_bytes(MossLocalModel model);
MOSS_API int64_t moss_local_frame_workspace_bytes(MossLocalModel model);

/* Reorders the weights into the order in which the kernel streams them. */
MOSS_API MossStatus moss_local_frame_pack(const LocalFramePackParams* params);

/* One frame of B rows: stop decision and 12 codes, each drawn from the logits that the ones before it lead to, and the
 * embedding of the next backbone input. All in one cooperative launch; a row's results are bitwise the same in every batch.
 * All floating point tensors without another dtype are bf16. */
typedef struct LocalFrameDecodeParams {
  uint32_t struct_size;
  uint32_t abi_version;
  MossLocalModel model;
  int32_t batch;           /* B, 1 .. 128 */
  int32_t multiprocessors; /* blocks of the launch, at least B / 8, for a table 8; 0: as many as the products have
                              units (128), or the device if fewer */
  int32_t pool_rows;       /* S+1 */
  int64_t audio_pad_id;    /* code of rows that do not continue */
  int64_t slot_id;         /* text id of a generated row */
  int64_t pad_token_id;    /* text id of a row that does not continue */
  int64_t text_rows;       /* rows of embed_tokens */
  float layer_norm_epsilon;
  int32_t reserved;
  const void* packed;      /* from moss_local_frame_pack, aligned to 128 bytes */
  const void* ln_1_weight; /* [hidden], likewise the next five; bf16 is aligned to 4 bytes where nothing else is said */
  const void* ln_1_bias;
  const void* ln_2_weight;
  const void* ln_2_bias;
  const void* ln_f_weight;
  const void* ln_f_bias;
  const void* c_attn_bias; /* [3*hidden] */
  const void* c_proj_bias; /* [hidden] */
  const void* fc_in_bias;  /* [inner] */
  const void* fc_out_bias; /* [hidden] */
  const void* stop_head;   /* [2, hidden] row 0 continues, row 1 stops */
  const void* audio_embeddings; /* [12, vocab, hidden] aligned to 16 bytes */
  const void* embed_tokens;     /* [text_rows, hidden] */
  const float* rope;            /* [12, head_dim/2, 2] cos and sin, already rounded to bf16; aligned to 8 bytes */
  const void* qkv_table;        /* [11, vocab, 3*hidden] from moss_local_qkv_table, aligned to 16 bytes; null: c_attn
                                   runs at every position */
  const void* hidden;           /* [B, hidden], rows contiguous one after the other */
  const int32_t* row_map;       /* [B] pool row of each batch row */
  const uint8_t* active;        /* [B] */
  const float* temperature;     /* [S+1], the sampling state as in SampleCodebookParams */
  const int32_t* top_k;
  const float* top_p;
  const float* repetition_penalty;
  const float* text_temperature; /* [S+1] the same for the stop head */
  const int32_t* text_top_k;
  const float* text_top_p;
  const int64_t* seed;
  int32_t* frame;               /* [S+1] advanced in rows that continue */
  int32_t* seen;                /* [S+1, 12, ceil(vocab/32)] */
  const int64_t* teacher_codes; /* [B, 12] fed to the next position in place of the drawn ones (tests); null: none */
  int64_t* codes;               /* [B, 12] written; pad ids in rows that do not continue */
  uint8_t* continues;           /* [B] written: 1 if the row is active and drew continue */
  void* feedback;               /* [B, hidden] written: embedding of the row (slot_id, codes), or of pad_token_id alone */
  int32_t* status;              /* [B] written: or of the draws' status bits, 0 in inactive rows */
  float* stop_logits;           /* [B, 2] written in active rows; null: none. Likewise the next two */
  float* audio_logits;          /* [B, 12, vocab] aligned to 16 bytes */
  void* hidden_out;             /* [B, 12, hidden] output of ln_f at each position */
  void* workspace;              /* moss_local_frame_workspace_bytes, aligned to 256 bytes; before the first frame, and
                                   after one that the device did not finish, its first 256 bytes 0 and all others 0xff.
                                   One per live graph or stream; serves batches of all sizes, with a table or without */
  void* stream;
} LocalFrameDecodeParams;

/* Errors: MOSS_ERROR_INVALID_ARGUMENT, MOSS_ERROR_UNSUPPORTED (device), MOSS_ERROR_NO_DEVICE, MOSS_ERROR_CUDA. */
MOSS_API MossStatus moss_local_frame_decode(const LocalFrameDecodeParams* params);

/* q, k and v of every code, rotated for the position that follows its codebook, by the arithmetic of the frame itself.
 * `decode`: as for moss_local_frame_decode; read are model, multiprocessors, layer_norm_epsilon, packed, ln_1_*,
 * c_attn_bias, audio_embeddings, rope, workspace and stream. `table`: [11, vocab, 3*hidden] bf16, aligned to 16 bytes,
 * written. */
MOSS_API MossStatus moss_local_qkv_table(const LocalFrameDecodeParams* decode, void* table);

/* ---- paged_attention ---- */

/* A value of `dependent_launch` below. */
#define MOSS_DEPENDENT_EARLY 2

/* A new token per row joins the paged cache, and its queries attend over it and all tokens before it; bf16, sums in fp32.
 * Queries and the new key have a root mean square norm for each head and half-split rotation, rounded once. The norms
 * round as eager modules do. A row's result does not depend on the batch; inactive rows give 0 and store nothing. All
 * tensors are contiguous and bf16 where no dtype is given; no two active rows name the same pool row. */
typedef struct PagedAttentionParams {
  uint32_t struct_size; /* sizeof(PagedAttentionParams) */
  uint32_t abi_version; /* MOSS_ABI_VERSION */
  int32_t batch;        /* B, 0 .. 65535 */
  int32_t kv_heads;     /* H, 1 .. 65535 */
  int32_t group;        /* G, 1 .. 4: query heads of a key head */
  int32_t head_dim;     /* D, 128 */
  int32_t page_size;    /* Z, a power of two, >= 16 */
  int32_t pages;        /* P+1 */
  int32_t table_pages;  /* N */
  int32_t pool_rows;    /* S+1 */
  int32_t parts;        /* blocks for each row and key head: 1, 2, 4, 8 or 16, with the same results; 0: by the batch */
  int32_t dependent_launch; /* 1: dependent launch; MOSS_DEPENDENT_EARLY: all but `qkv` is read before the wait; no
                               kernel that may still run writes it */
  float eps;                /* of the norms */
  float scale;              /* of the scores, times log2 e */
  const void* qkv;          /* [B, (H*G + 2*H)*D] queries, keys, values; aligned to 16 bytes */
  const void* q_norm;       /* [D] this and the next two are aligned to 4 bytes */
  const void* k_norm;       /* [D] */
  const void* cos_sin;      /* [L, D] cosines of the D/2 pairs at each position, then their sines */
  void* key_pages;          /* [P+1, H, Z, D] read and written; this and the next are aligned to 16 bytes */
  void* value_pages;        /* [P+1, H, Z, D] read and written */
  const int32_t* page_table; /* [S+1, N] 0 .. P (not checked on the device, as the next two); token t of pool row s lies
                                in page [s, t / Z] at place t % Z */
  const int32_t* positions;  /* [S+1] tokens that each pool row holds, less than L and N*Z; row S is padding's */
  const int32_t* row_map;    /* [B] 0 .. S */
  const uint8_t* active;     /* [B] */
  void* out;                 /* [B, H*G*D] written, aligned to 8 bytes */
  float* partials;           /* [B, H, 16, G, D+2] workspace, aligned to 16 bytes */
  int32_t* arrived;          /* [B, H] workspace, 0 between calls */
  void* stream;              /* cudaStream_t */
} PagedAttentionParams;

/* Errors: as moss_sample_codebook. */
MOSS_API MossStatus moss_paged_attention(const PagedAttentionParams* params);

/* ---- ring_kv_write ---- */

/* Stores the keys and values of a chunk of tokens in the rings of a codec layer. Keys are rotated here, unless `cos_sin`
 * is null: interleaved RoPE in fp32, rounded once. Token n of a stream goes to ring position n mod C; of more than C valid
 * tokens the last C are kept. Nothing else is written, and offsets do not advance. All tensors are contiguous; rows with
 * valid tokens name different slots. */
typedef struct RingKvWriteParams {
  uint32_t struct_size;   /* sizeof(RingKvWriteParams) */
  uint32_t abi_version;   /* MOSS_ABI_VERSION */
  int32_t batch;          /* B, 0 .. 65535 */
  int32_t tokens;         /* T, >= 0 */
  int32_t heads;          /* H, >= 1 */
  int32_t head_dim;       /* D, a multiple of 8 in 8 .. 256 */
  int32_t capacity;       /* C, >= 1 */
  MossDtype dtype;        /* of qkv and the rings */
  const void* qkv;        /* [B, T, 3*H*D] all q (not read), all k, all v; this and the next three are aligned to 16 bytes */
  const float* cos_sin;   /* [B, T, D/2, 2] cosine and sine of each pair's angle at the token's position */
  void* ring_k;           /* [S+1, H, C, D] written; row S is the null slot, which no row with valid tokens names */
  void* ring_v;           /* [S+1, H, C, D] written */
  const int32_t* slots;   /* [B] 0 .. S (not checked on the device) */
  const int32_t* valid;   /* [B] 0 .. T (not checked on the device); a row with 0 writes nothing */
  const int64_t* offset;  /* [S+1] tokens that each slot had consumed before this chunk */
  int32_t dependent_launch; /* 1: dependent launch */
  int32_t reserved;
  void* stream; /* cudaStream_t */
} RingKvWriteParams;

/* Errors: as moss_sample_codebook. */
MOSS_API MossStatus moss_ring_kv_write(const RingKvWriteParams* params);

/* ---- codec_linear ---- */

/* gelu(norm(x) @ weight^T) stored in `out`, or scale times the product added to `out`; sums in fp32. The norm
 * is LayerNorm with eps 1e-5, GELU the exact one. Tensors are contiguous and bf16 where no dtype is given. */
typedef struct CodecLinearParams {
  uint32_t struct_size;    /* sizeof(CodecLinearParams) */
  uint32_t abi_version;    /* MOSS_ABI_VERSION */
  int32_t rows;            /* M, 0 .. 32; with a tile up to 2^20 */
  int32_t outputs;         /* N, even, at most 2^30 */
  int32_t inputs;          /* K, a multiple of 32 */
  MossDtype x_dtype;       /* MOSS_BFLOAT16, or with a norm MOSS_FLOAT32 too */
  MossDtype out_dtype;     /* MOSS_BFLOAT16 or MOSS_FLOAT32 */
  int32_t gelu;            /* 1: GELU follows the product */
  const void* x;           /* [M, K] of `x_dtype`, aligned to 16 bytes */
  const void* weight;      /* [N, K] aligned to 16 bytes; read before the wait of a dependent launch, as the next five */
  const void* norm_weight; /* [K] aligned to 16 bytes; null: no norm */
  const float* norm_sums;  /* [2, N] weight @ norm_weight and weight @ norm_bias, aligned to 8 bytes; null: no norm */
  const void* scale;       /* [N] aligned to 4 bytes; null: the result is stored, not added */
  const void* next_norm_weight; /* [768] with `normed`, aligned to 16 bytes */
  const void* next_norm_bias;   /* the same */
  const float* cos_sin;    /* [M, 32, 2] aligned to 8 bytes, by which q and k of outputs q, k, v in heads of 64 are rotated:
                              a tile of 128 or 192 outputs, no slices, GELU and scale; null: not */
  void* out;               /* [M, N] of `out_dtype`, aligned to 8 bytes, written; read too with `scale` */
  void* normed;            /* [M, 768] written: the norm of what `out` then holds, bf16; with `scale`, in tiles of 64 or
                              128 x 96; null: none. Aligned to 16 bytes */
  void* moments;           /* 1,152 bytes for each 16 rows with `normed`, zero before first use; aligned to 128 bytes */
  int32_t dependent_launch; /* 1: dependent launch */
  int32_t tile_rows;    /* of a tile, with the next two; codec_linear_{cluster,tiles,partial}.cu list the tiles */
  int32_t tile_columns; /* 0: no tile. With one no norm, x bf16, N a multiple of 8, K of 64 * slices, `out` and `scale`
                           aligned to 16 bytes; with 96 or more in one slice out bf16, not both GELU and scale */
  int32_t slices;       /* of the inputs, one for each block */
  int32_t partial;      /* 1: out [slices, M, N] fp32 = the sum over each slice; no cluster, GELU or scale */
  void* stream; /* cudaStream_t */
} CodecLinearParams;

/* Errors: as moss_sample_codebook. */
MOSS_API MossStatus moss_codec_linear(const CodecLinearParams* params);

/* ---- prefill_linear ---- */

typedef enum LinearMode {
  MOSS_LINEAR_WHOLE = 0,   /* out [M, N] bf16 = product */
  MOSS_LINEAR_GATE_UP = 1, /* out [M, N/2] bf16 = SiLU(even outputs) * odd outputs */
  MOSS_LINEAR_PARTIAL = 2, /* out [S, M, N] fp32 = the sum over each slice of K */
  MOSS_LINEAR_ADD = 3      /* out [M, N] bf16 += the sums over the slices of K, in order, rounded once */
} LinearMode;

/* x @ weight^T for many rows: products of the tensor cores, sums in fp32. The sum over a slice runs in an order of its own
 * length alone, so a row's result is bitwise the same whatever the number of rows. */
typedef struct PrefillLinearParams {
  uint32_t struct_size; /* sizeof(PrefillLinearParams) */
  uint32_t abi_version; /* MOSS_ABI_VERSION */
  LinearMode mode;
  int32_t rows;    /* M, 0 .. 2^30 */
  int32_t outputs; /* N, a multiple of 16, at most 2^30 */
  int32_t inputs;  /* K, a multiple of 64 * slices */
  int32_t slices;  /* S, 1 .. 64; 1 unless PARTIAL or ADD */
  int32_t columns; /* outputs of a tile; prefill_linear.cu lists tiles, which all have the same result. 0: the fastest */
  const void* x;      /* [M, K] bf16 contiguous, aligned to 16 bytes, as the next two */
  const void* weight; /* [N, K] bf16 contiguous */
  void* out;          /* written; read too with ADD */
  int32_t dependent_launch; /* 1: dependent launch (`weight` is read before the wait) */
  int32_t tile_rows;        /* rows of a tile, as `columns` */
  void* stream; /* cudaStream_t */
} PrefillLinearParams;

/* Errors: as moss_sample_codebook. */
MOSS_API MossStatus moss_prefill_linear(const PrefillLinearParams* params);

/* ---- backbone_linear ---- */

/* x @ weight^T for few rows, in the time of streaming the weights. The sum over a slice runs in an order of its own length
 * alone: a row's result is bitwise the same whatever the number of rows, and that of moss_prefill_linear. */
typedef struct BackboneLinearParams {
  uint32_t struct_size;   /* sizeof(BackboneLinearParams) */
  uint32_t abi_version;   /* MOSS_ABI_VERSION */
  LinearMode mode; /* all but MOSS_LINEAR_ADD */
  int32_t rows;           /* M, 0 .. 128 */
  int32_t outputs;        /* N, a multiple of 16, at most 2^30 */
  int32_t inputs;         /* K, a multiple of 64 * slices */
  int32_t slices;         /* S, 1 .. 64; 1 unless PARTIAL */
  int32_t dependent_launch; /* 1: dependent launch (`weight` is read before the wait) */
  const void* x;          /* [M, K] bf16 contiguous, aligned to 16 bytes, as the next two */
  const void* weight;     /* [N, K] bf16 contiguous */
  void* out;              /* written, see LinearMode */
  void* stream;           /* cudaStream_t */
} BackboneLinearParams;

/* Errors: as moss_sample_codebook. */
MOSS_API MossStatus moss_backbone_linear(const BackboneLinearParams* params);

/* ---- ring_attention ---- */

/* Attention of a chunk over the ring of its slot and over itself, bf16 with fp32 sums: the query at position p sees
 * the keys max(0, p - window + 1) .. p. Queries and keys of the chunk are rotated here as by moss_ring_kv_write. The
 * rings hold the tokens before the chunk; with `write` its keys and values are stored after the attention, exactly as
 * moss_ring_kv_write does. All tensors are contiguous and bf16 where no dtype is given; rows with valid tokens name
 * different slots. */
typedef struct RingAttentionParams {
  uint32_t struct_size;  /* sizeof(RingAttentionParams) */
  uint32_t abi_version;  /* MOSS_ABI_VERSION */
  int32_t batch;         /* B, 0 .. 65535 */
  int32_t tokens;        /* T, >= 0; rotated already, B * T and S+1 * H * C are at most 2^30 */
  int32_t heads;         /* H, 1 .. 65535 */
  int32_t head_dim;      /* D, 64 */
  int32_t capacity;      /* C, 1 .. 2^24 */
  int32_t window;        /* 1 .. C, the query itself included */
  int32_t ring_slots;    /* S+1 */
  int32_t write;         /* 1: store the chunk in the rings */
  float scale;           /* of the scores, times log2 e */
  int32_t dependent_launch; /* 1: dependent launch (slots and offset are read before the wait, as hints, and again
                               later); MOSS_DEPENDENT_EARLY: all but qkv is read before it; no kernel that may still
                               run writes it */
  int32_t qkv_slices;    /* 0; or P <= 4: qkv is [P, B, 1, 3*H*D] fp32, added and rounded; B * H of 397 .. 1320 */
  const void* qkv;       /* [B, T, 3*H*D] all q, all k, all v; all but slots, valid and offset are aligned to 16 bytes */
  const float* cos_sin;  /* [B, T, D/2, 2] cosine and sine of each pair's angle; null: q and k are rotated already, as
                            many rows of more than 32 must be */
  void* ring_k;          /* [S+1, H, C, D] read, with `write` written too; row S is the null slot, which no row with
                            valid tokens names */
  void* ring_v;          /* [S+1, H, C, D] likewise */
  const int32_t* slots;  /* [B] 0 .. S (not checked on the device) */
  const int32_t* valid;  /* [B] 0 .. T (not checked on the device) */
  const int64_t* offset; /* [S+1] tokens that each slot had consumed before this chunk */
  void* out;             /* [B, T, H*D] written; 0 for tokens at or beyond `valid` */
  void* stream;          /* cudaStream_t */
} RingAttentionParams;

/* Errors: as moss_sample_codebook. */
MOSS_API MossStatus moss_ring_attention(const RingAttentionParams* params);

#ifdef __cplusplus
}
#endif

#endif
