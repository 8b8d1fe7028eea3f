/* What Python and C must agree on: the two structures that Python fills in for a call, and the tokens of a page.
 *
 * The one header of an interface here. Python declares the same structures in layout.py and compares them, when the
 * library is loaded, with what this file exports. Each field is listed once, as FIELD(type, name).
 */
#include <stdint.h>

#define PAGE 64         /* most tokens of a page: `quant.PAGE` */

/* Packed tokens, as in fade_runtime/storage/packed.py: T tokens in P pages, T4 in the high tier, T2 in the low tier. */
#define PACKED_FIELDS(FIELD)                                                                            \
    FIELD(int64_t, pages)                                                                               \
    FIELD(int64_t, key_bits)                                                                            \
    FIELD(int64_t, value_bits)                                                                          \
    FIELD(int64_t, low_key_bits)                                                                        \
    FIELD(int64_t, low_value_bits)                                                                      \
    FIELD(int64_t, offset_bytes)                /* of an offset: 1 (unsigned), 2 or 4 */                \
    FIELD(const int32_t *, page_len)            /* [P] */                                               \
    FIELD(const int32_t *, page_low)            /* [P] */                                               \
    FIELD(const uint8_t *, key_codes)           /* [T4, dim * key_bits / 8] */                          \
    FIELD(const uint8_t *, low_key_codes)       /* [T2, dim * low_key_bits / 8] */                      \
    FIELD(const uint8_t *, value_codes)         /* [T4, dim * value_bits / 8] */                        \
    FIELD(const uint8_t *, low_value_codes)     /* [T2, dim * low_value_bits / 8] */                    \
    FIELD(const uint8_t *, key_scale)           /* [P, dim] */                                          \
    FIELD(const uint8_t *, key_zero)            /* [P, dim] */                                          \
    FIELD(const uint16_t *, key_reach)          /* [P, 3] float16, or bfloat16 where wide */            \
    FIELD(const uint16_t *, value_scale)        /* [T, groups] the same */                              \
    FIELD(const uint16_t *, value_zero)         /* [T, groups] the same */                              \
    FIELD(const int32_t *, page_slot)           /* [P] */                                               \
    FIELD(const void *, offset)                 /* [T] of offset_bytes */                               \
    FIELD(const int32_t *, page_row)            /* [P] */                                               \
    FIELD(const float *, bias)                  /* [T, queries], or NULL */                             \
    FIELD(const int32_t *, since)               /* [rows, queries] first slot that is read, or NULL */  \
    FIELD(float *, mass)                        /* [T]; written if there are weights */

#define CALL_FIELDS(FIELD)                                                                              \
    FIELD(int64_t, rows)                                                                                \
    FIELD(int64_t, queries)                                                                             \
    FIELD(int64_t, dim)                                                                                 \
    FIELD(int64_t, groups)                                                                              \
    FIELD(int64_t, parts)                                                                               \
    FIELD(int64_t, full)                        /* full-precision tokens of a row */                    \
    FIELD(int64_t, key_stride)                  /* floats from a row to the next */                     \
    FIELD(int64_t, value_stride)                                                                        \
    FIELD(int64_t, threads)                                                                             \
    FIELD(const float *, query)                 /* [rows, queries, dim] */                              \
    FIELD(const float *, key)                   /* [rows, full, dim], rows key_stride apart */          \
    FIELD(const float *, value)                 /* [rows, full, dim], rows value_stride apart */        \
    FIELD(const float *, bias)                  /* [rows, queries, full], or NULL */                    \
    FIELD(const float *, weights)               /* [queries], or NULL: no statistics */                 \
    FIELD(const float *, sinks)                 /* [rows, queries] beside the scores, or NULL */            \
    FIELD(const packed *, part)                 /* [parts] */                                           \
    FIELD(float *, out)                         /* [rows, queries, dim] */                              \
    FIELD(float *, mass)                        /* [rows, full]; written if there are weights */        \
    FIELD(float, softcap)                       /* 0: none */                                           \
    FIELD(float, decay)                         /* of the statistics found in mass; 0: none are */

#define DECLARE(type, name) type name;
#define DESCRIBE(type, name) #type " " #name ";"

typedef struct { PACKED_FIELDS(DECLARE) } packed;
typedef struct { CALL_FIELDS(DECLARE) } call;

const int64_t attend_sizes[] = {PAGE, sizeof(packed), sizeof(call)};
const char attend_packed_fields[] = PACKED_FIELDS(DESCRIBE);
const char attend_call_fields[] = CALL_FIELDS(DESCRIBE);
