/* ---- Tiles: products and sums over rows of keys ----------------------------------------------
   Twin: none. Not here: their text (tiles.inl), which keys a tile has (attend_pack.h).
   All arithmetic on rows of keys is in a few functions. Their one text is src/tiles.inl, of bf16
   pairs src/pairs.inl, which is read once per instruction set. They are compiled for that set
   whatever flags the user gave; desc.isa or the machine chooses among them when a call begins. The
   bits of a row of the result depend on that row's operands alone, because every sum runs over k
   in ascending order. How many rows there are, and where the row stands among them, changes
   nothing. */
#pragma once
#include "sequences.h"

/* What a product reads: packed keys and values, queries, their gradients, weights. Where products
   take pairs of bf16, one of these holds the bits of a pair, the first in the lower half. A pair
   that has been copied is finite, so it is no NaN, whose bits a move might change. */
typedef nsa_real nsa__packed;

/* An operand of a product: element (i, c) is data[r * row + c * step], where r is i, or rows[i]. */
typedef struct nsa__matrix {
    const nsa__packed *data;
    ptrdiff_t row, step; /* in elements; step is 1 in the right operand */
    const int *rows;     /* NULL: all rows in order */
} nsa__matrix;

/* Lines that follow each other and are read after a product, which prefetches one in each step of
   its sums: many at once would fill the queue of misses. The last of some has no end. */
typedef struct nsa__lines {
    const char *at;
    int n;
} nsa__lines;

/* What a product writes: row i of a b goes to row i of data, or rows[i]. With `add` it is added to
   scale[i] times what is there; softmax needs this to shrink a row's earlier sums. */
typedef struct nsa__result {
    nsa_real *data;
    ptrdiff_t row;
    const int *rows; /* NULL: all rows in order */
    int add;
    const nsa_real *scale; /* a factor for each row of the product, NULL: 1 */
    nsa__lines *later;     /* prefetched meanwhile, or NULL */
} nsa__result;

/* All rows in order, without a factor. */
static nsa__result nsa__result_at(nsa_real *data, ptrdiff_t row, int add) {
    const nsa__result result = {data, row, NULL, add, NULL, NULL};
    return result;
}

/* A product, from a column of its result on; rows i .. m - 1 of it, in pieces. */
typedef struct nsa__product {
    int k, column;
    const nsa__matrix *a, *b;
    const nsa__result *c;
    nsa_real factor;   /* of pairs */
    nsa__lines *later; /* those that are left */
} nsa__product;
typedef void nsa__pieces(nsa__product *x, int i, int m);

/* Scores of one tile, for rows of some queries: keys first .. first + n - 1, n a multiple of 16. */
typedef struct nsa__scored {
    int rows, n, group, first;
    const uint64_t *mask; /* bit j of mask[r / group] is 1 if row r sees key j of the tile */
    const int *row;       /* row r is row row[r] of what is kept for a task */
} nsa__scored;

/* The running softmax of a task's rows. */
typedef struct nsa__running {
    nsa_real *m; /* of every row: the largest score so far */
    nsa_real *l; /* of every row: 16 partial sums of p */
    nsa_real
        *shrink; /* of the rows at hand: what earlier sums of p are to be multiplied by; written
                         in whole vectors, so it has room for 16 more */
} nsa__running;

typedef struct nsa__tiles {
    /* c[m][n] = a[m][k] b[k][n] */
    void (*gemm)(int m, int n, int k, const nsa__matrix *a, const nsa__matrix *b,
                 const nsa__result *c);
    /* Takes scores s, rows `ld` apart, into the running softmax. p gets exp(s - m), 0 where masked,
       with rows `ld_p` apart; it may be s, whose masked scores become the lowest number. A row that
       sees none of the keys keeps its state to the bit. */
    void (*softmax)(const nsa__scored *x, ptrdiff_t ld, nsa_real *s, ptrdiff_t ld_p, nsa_real *p,
                    const nsa__running *so_far);
    /* sum[j] = sum over the rows r of exp(s[r][j] - lse[r]) */
    void (*probability)(int rows, int n, ptrdiff_t ld, const nsa_real *lse, const nsa_real *s,
                        nsa_real *sum);
    /* how many of n numbers have bits of at least `least`, as integers */
    int (*at_least)(int n, const nsa_real *x, nsa__lane least);
    /* whether all numbers are finite; n is a multiple of 16 */
    int (*all_finite)(int rows, int n, ptrdiff_t ld, const nsa_real *x);
    /* n numbers of each of the rows of x from `row` on as reals; rows of `to` are ld apart */
    void (*widen)(int rows, int n, const nsa_tensor *x, const void *row, ptrdiff_t ld,
                  nsa_real *to);
    /* to = factor x, for n numbers, a multiple of 16 */
    void (*scale)(int n, nsa_real factor, const nsa_real *x, nsa_real *to);
    /* c = x + c.scale c as a product ends, for rows of n numbers, a multiple of 16 */
    void (*join)(int rows, int n, const nsa_real *x, const nsa__result *c);
    /* to = g[0] x[0] + g[1] x[1] + g[2] x[2], for n numbers, a multiple of 16 */
    void (*gate)(int n, const nsa_real g[3], const nsa_real *const x[3], nsa_real *to);
    /* Row c of `to` becomes column c of x. Rows are whole vectors on both sides, and some more may
       be read and written: both hold a multiple of 16 rows or numbers of them. */
    void (*transpose)(int rows, int columns, ptrdiff_t ld, const nsa_real *x, ptrdiff_t ld_to,
                      nsa_real *to);
    /* s becomes p = exp(s - lse), 0 where masked, and dp becomes ds = p (dp - delta), rows `ld`
       apart, with lse and delta of the task's rows */
    void (*gradient)(const nsa__scored *x, ptrdiff_t ld, const nsa_real *lse, const nsa_real *delta,
                     nsa_real *s, nsa_real *dp);
} nsa__tiles;

/* Products of rows of bf16. Their operands are pairs along k, their sums f32. */
typedef struct nsa__pairs {
    /* c[m][n] = factor a[m][k] b[k][n] for k pairs, where n is a multiple of 16. A result that is
       added to takes no factor. b has all rows in order. */
    void (*gemm)(int m, int n, int k, const nsa__matrix *a, const nsa__matrix *b,
                 const nsa__result *c, nsa_real factor);
    /* Rows 2 r and 2 r + 1 of n rows of x become row r of `to`, `wide` pairs; behind an odd n stand
       zeros. `wide` is a multiple of 16. */
    void (*pair_rows)(int n, int wide, const nsa__matrix *x, nsa__packed *to);
    /* n numbers of each row become n / 2 pairs, rounded, from the row's start on */
    void (*round_rows)(int rows, int n, ptrdiff_t ld, nsa_real *x);
    /* The same of x times factor[row_index[r]], or times 1 if that is NULL; x becomes the pairs
       that rows 2 r and 2 r + 1 make, rows one after the other, `ld` apart. `by_row` may be NULL;
       its rows are ld / 2 apart. n and ld are multiples of 16. */
    void (*round_pairs)(int rows, int n, ptrdiff_t ld, const int *row_index, const nsa_real *factor,
                        nsa_real *x, nsa__packed *by_row);
    /* as nsa__store of bf16 */
    void (*store)(int n, const nsa_real *x, void *row);
} nsa__pairs;

/* -- tiles of each instruction set -- */

/* What these are depends on the set that is read: NSA__T(name) is its name of a function or type,
   NSA__L the numbers of its vector. */
#define NSA__PASTE_(a, b) nsa__##a##_##b
#define NSA__PASTE(a, b)  NSA__PASTE_(a, b)
#define NSA__T(name)      NSA__PASTE(name, NSA__ISA)
#define NSA__L            (NSA__BYTES ? NSA__BYTES / (int)sizeof(nsa_real) : 1)
#define NSA__V            NSA__T(vec)
#define NSA__I            NSA__T(lanes)
#define NSA__TO(x)        (*(NSA__T(memory) *)(x))
#define NSA__FROM(x)      (*(const NSA__T(memory) *)(x))

/* NSA__BYTES is the size of a vector. A piece of a product, NSA__ROWS x NSA__VECTORS, stays in
   registers, beside NSA__VECTORS of b and a factor of a. That makes 6 x 2 + 2 + 1 = 15 of AVX2's 16
   registers, and 6 x 4 + 4 + 1 = 29 of the 32 of AVX-512 and NEON. NSA__KEEP_IN_REGISTER(x) is an
   empty instruction that may change x, so that the compiler keeps x in a register. NSA__MAX(x, a,
   b) is x = a > b ? a : b in one instruction, which GCC makes three of. NSA__NEAREST(e, x) is e = x
   rounded to whole numbers, and NSA__SCALEF(p, e) p = p 2^e, which is 0 if e is -inf, even of NaN.
   NSA__OF_F16(x, halves) is x = a vector of f16 as f32. */
#define NSA__ISA     plain
#define NSA__BYTES   0
#define NSA__ROWS    4
#define NSA__VECTORS 4
/* Where all machines have multiply-adds, GCC makes them of some copies of a loop of numbers and not
   of others, and a token that is decoded would get other bits than in the whole. */
#if defined(__GNUC__) && !defined(__clang__)
#define NSA__TARGET __attribute__((__optimize__("O3", "fp-contract=off", "no-fast-math")))
#else
#define NSA__TARGET NSA__COMPILED
#endif
#define NSA__KEEP_IN_REGISTER(x) (void)(x)
#include "tiles.inl"

/* One of these, where there is one: no machine has two. */
#if defined(NSA__HAS_SSE2)
#define NSA__ISA                 sse2
#define NSA__BYTES               16
#define NSA__ROWS                4
#define NSA__VECTORS             2
#define NSA__TARGET              NSA__COMPILED
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+x"(x))
#elif defined(NSA__HAS_NEON)
#define NSA__ISA                 neon
#define NSA__BYTES               16
#define NSA__ROWS                6
#define NSA__VECTORS             4
#define NSA__TARGET              NSA__COMPILED
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+w"(x))
#define NSA__OF_F16(x, halves)   __asm__("fcvtl %0.4s, %1.4h" : "=w"(x) : "w"(halves))
#elif defined(NSA__HAS_SIMD128)
#define NSA__ISA                 simd128
#define NSA__BYTES               16
#define NSA__ROWS                4
#define NSA__VECTORS             2
#define NSA__TARGET              NSA__COMPILED
#define NSA__KEEP_IN_REGISTER(x) (void)(x) /* the engine that runs it chooses the registers */
#endif
#ifdef NSA__ISA
#include "tiles.inl"
#endif

#ifdef NSA__HAS_AVX
#define NSA__LETTER_float     "s" /* of single and double in x86's names of instructions */
#define NSA__LETTER_double    "d"
#define NSA__LETTER_OF_(real) NSA__LETTER_##real
#define NSA__LETTER_OF(real)  NSA__LETTER_OF_(real)
#define NSA__OF_TWO(name)     "v" name "p" NSA__LETTER_OF(NSA_REAL) " {%2, %1, %0|%0, %1, %2}"

/* The machine comes behind the level: with -Os GCC 13 and 14 take a level that follows for the
   end of the machine, and compile vectors as memory. */
#define NSA__ISA                 avx2
#define NSA__BYTES               32
#define NSA__ROWS                6
#define NSA__VECTORS             2
#define NSA__TARGET              NSA__COMPILED __attribute__((__target__("avx2,fma")))
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+x"(x))
#define NSA__MAX(x, a, b)        __asm__(NSA__OF_TWO("max") : "=x"(x) : "x"(a), "x"(b))
#ifdef NSA__HAS_F16C
#define NSA__OF_F16(x, halves) __asm__("vcvtph2ps {%1, %0|%0, %1}" : "=x"(x) : "xm"(halves))
#endif
#include "tiles.inl"

#define NSA__ISA     avx512
#define NSA__BYTES   64
#define NSA__ROWS    6
#define NSA__VECTORS 4
#define NSA__TARGET \
    NSA__COMPILED __attribute__((__target__("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+v"(x))
#define NSA__MAX(x, a, b)        __asm__(NSA__OF_TWO("max") : "=v"(x) : "v"(a), "v"(b))
#define NSA__NEAREST(e, x) \
    __asm__("vrndscalep" NSA__LETTER_OF(NSA_REAL) " {$8, %1, %0|%0, %1, 8}" : "=v"(e) : "v"(x))
#define NSA__SCALEF(p, e)      __asm__(NSA__OF_TWO("scalef") : "=v"(p) : "v"(p), "v"(e))
#define NSA__OF_F16(x, halves) __asm__("vcvtph2ps {%1, %0|%0, %1}" : "=v"(x) : "vm"(halves))
#include "tiles.inl"
#endif

/* Sets with products of bf16 have nothing else of their own. NSA__DOT(sum, a, b) adds to each lane
   of f32 sums the two products of its pairs. It is the instruction itself, because compilers have
   changed the types of its builtins from version to version. VDPBF16PS adds the odd product, then
   the even one, each as a multiply-add that rounds to nearest. BFDOT rounds to odd. Both take
   subnormal numbers for 0. NSA__ROUND(halves, x) rounds a vector of f32 to bf16 in one
   instruction, and NSA__OF_HALVES(x, halves) widens one, which GCC does in two parts. */
#if defined(NSA__HAS_BF16_BY_HAND)
#include NSA__BF16_BY_HAND
#elif defined(NSA__HAS_AVX512_BF16)
#define NSA__ISA     bf16
#define NSA__BYTES   64
#define NSA__ROWS    6
#define NSA__VECTORS 4
#define NSA__TARGET \
    NSA__COMPILED   \
    __attribute__((__target__("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+v"(x))
#define NSA__DOT(sum, a, b) \
    __asm__("vdpbf16ps {%2, %1, %0|%0, %1, %2}" : "+v"(sum) : "v"(a), "v"(b))
#define NSA__ROUND(halves, x)     __asm__("vcvtneps2bf16 {%1, %0|%0, %1}" : "=v"(halves) : "v"(x))
#define NSA__OF_HALVES(x, halves) __asm__("vpmovzxwd {%1, %0|%0, %1}" : "=v"(x) : "vm"(halves))
#elif defined(NSA__HAS_NEON_BF16)
#ifdef __clang__
#define NSA__BFDOT __attribute__((__target__("bf16")))
#else
#define NSA__BFDOT __attribute__((__target__("+bf16")))
#endif
#define NSA__ISA                 bf16
#define NSA__BYTES               16
#define NSA__ROWS                6
#define NSA__VECTORS             4
#define NSA__TARGET              NSA__COMPILED NSA__BFDOT
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+w"(x))
#define NSA__DOT(sum, a, b)      __asm__("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(a), "w"(b))
#endif
#ifdef NSA__ISA
#include "tiles.inl"
#include "pairs.inl"
#endif

/* The set that a call uses, of those that nsa_isa_available has allowed. The enum lists the sets of
   one kind of machine from narrow to wide, so the first available from its end is the widest. */
static nsa_isa nsa__isa_of(nsa_isa isa) {
    for (int widest = NSA_ISA_NEON_BF16; isa == NSA_ISA_DETECT; widest--)
        if (nsa_isa_available((nsa_isa)widest)) isa = (nsa_isa)widest;
    return isa;
}

/* The products of bf16 of a call, or NULL: its rows of bf16 are widened then. */
static const nsa__pairs *nsa__pairs_of(const nsa_desc *d) {
    nsa_isa isa = nsa__isa_of(d->isa);
    if (d->products == NSA_PRODUCTS_F32 || (isa != NSA_ISA_AVX512_BF16 && isa != NSA_ISA_NEON_BF16))
        return NULL;
#if defined(NSA__HAS_BF16_BY_HAND) || defined(NSA__HAS_AVX512_BF16) || defined(NSA__HAS_NEON_BF16)
    return &nsa__pairs_bf16;
#else
    return NULL;
#endif
}

/* As nsa__store. `pairs` may be NULL. */
static void nsa__store_by(const nsa__pairs *pairs, nsa_dtype dtype, void *row, const nsa_real *from,
                          int n) {
    if (pairs && dtype == NSA_BF16)
        pairs->store(n, from, row);
    else
        nsa__store(dtype, row, from, n);
}

static const nsa__tiles *nsa__tiles_of(nsa_isa isa) {
    switch (nsa__isa_of(isa)) {
#ifdef NSA__HAS_SSE2
#ifdef NSA__HAS_BF16_BY_HAND
    case NSA_ISA_AVX512_BF16:
#endif
    case NSA_ISA_SSE2:
        return &nsa__tiles_sse2;
#endif
#ifdef NSA__HAS_AVX
    case NSA_ISA_AVX2:
        return &nsa__tiles_avx2;
#ifdef NSA__HAS_AVX512_BF16
    case NSA_ISA_AVX512_BF16:
#endif
    case NSA_ISA_AVX512:
        return &nsa__tiles_avx512;
#endif
#ifdef NSA__HAS_NEON
    case NSA_ISA_NEON_BF16:
    case NSA_ISA_NEON:
        return &nsa__tiles_neon;
#endif
#ifdef NSA__HAS_SIMD128
    case NSA_ISA_SIMD128:
        return &nsa__tiles_simd128;
#endif
    default:
        return &nsa__tiles_plain;
    }
}
