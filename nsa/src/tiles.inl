/* ---- The text of the tiles, read once per instruction set --------------------------------------
   Twin: none. Not here: products of bf16 pairs behind their pieces (pairs.inl).
   Written for vectors of NSA__L numbers in GCC's vector extension, which clang shares. Without the
   extension a vector is one number. */

/* Rows of a piece of one vector: two units of multiply-adds, each with a latency of four cycles,
   would wait for fewer chains than eight. */
#if NSA__BYTES == 64
#define NSA__NARROW 8
#else
#define NSA__NARROW NSA__ROWS
#endif

/* How a product adds up. A set that defines it has products of bf16 alone. */
#ifdef NSA__DOT
#define NSA__OF_PAIRS 1
#else
#define NSA__OF_PAIRS       0
#define NSA__DOT(sum, a, b) (sum) += (a) * (b)
#endif

/* A vector, its lanes as signed and as unsigned integers, and a vector that may lie at any address
   of a number. */
#if NSA__BYTES
typedef nsa_real NSA__T(vec) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__lane NSA__T(lanes) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__bits_t NSA__T(bits) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa_real NSA__T(memory)
    __attribute__((__vector_size__(NSA__BYTES), __aligned__(sizeof(nsa_real)), __may_alias__));
typedef uint16_t NSA__T(halves) __attribute__((__vector_size__(2 * NSA__L)));
typedef unsigned char NSA__T(eighths) __attribute__((__vector_size__(NSA__L)));
#else
typedef nsa_real NSA__T(vec);
typedef nsa__lane NSA__T(lanes);
typedef nsa__bits_t NSA__T(bits);
typedef nsa_real NSA__T(memory);
#endif

#if NSA__BYTES
NSA__INLINE NSA__TARGET NSA__V NSA__T(splat)(nsa_real x) {
    const NSA__V zero = {0}; /* x - 0 is a broadcast; x + 0 would be a sum, for -0 + 0 is 0 */
    return x - zero;
}
#if NSA__OF_PAIRS
/* A pair of the left operand in all lanes. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    NSA__T(bits) zero = {0};
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (NSA__V)(zero + pair);
}
/* NSA__L numbers of bf16 from memory of any alignment, each in the lower half of its lane. */
NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(halves_at)(const uint16_t *x) {
    NSA__T(halves) numbers;
    memcpy(&numbers, x, sizeof numbers);
#ifdef NSA__OF_HALVES
    NSA__T(bits) bits;
    NSA__OF_HALVES(bits, numbers);
    return bits;
#else
    return __builtin_convertvector(numbers, NSA__T(bits));
#endif
}
#else
/* Lane by lane on ? a : b, where the lanes of `on` are 0 or -1. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return (NSA__V)(((NSA__I)a & on) | ((NSA__I)b & ~on));
}
/* Bits j .. j + NSA__L - 1 of a mask. */
NSA__INLINE NSA__TARGET NSA__I NSA__T(seen)(uint64_t mask, int j) {
    static const nsa__lane one_bit[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                          256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    NSA__I zero = {0}, lane;
    memcpy(&lane, one_bit, sizeof lane);
    return ((zero + (nsa__lane)(mask >> j & 0xffff)) & lane) != 0;
}
#endif
#else
NSA__INLINE NSA__V NSA__T(splat)(nsa_real x) {
    return x;
}
NSA__INLINE NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return on ? a : b;
}
NSA__INLINE NSA__I NSA__T(seen)(uint64_t mask, int j) {
    return (NSA__I)(mask >> j & 1);
}
#endif

#if !NSA__OF_PAIRS
NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    return NSA__T(splat)(*x);
}
NSA__INLINE NSA__TARGET NSA__V NSA__T(greater)(NSA__V a, NSA__V b) {
#ifdef NSA__MAX
    NSA__V larger;
    NSA__MAX(larger, a, b);
    return larger;
#else
    return NSA__T(pick)(a > b, a, b);
#endif
}

#if NSA__BYTES
/* 2^r for |r| <= 1/2 in f32: a minimax polynomial with a relative error of 2e-8. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2_of_fraction)(NSA__V r) {
    NSA__ARITHMETIC
    NSA__V p = r * 0.0001535336206885849f + 0.001339887439398139f;
    p = p * r + 0.00961843735695742f;
    p = p * r + 0.055503324711908573f;
    p = p * r + 0.24022647913636852f;
    p = p * r + 0.6931472028550316f;
    return p * r + 1.0f;
}
#endif

/* 2^x for x <= 0, as softmax needs it. 2^0 is exactly 1, so a shrink of 1 changes no bit. Results
   below the normal numbers are 0 or subnormal. x = e + r with e an integer and |r| <= 1/2. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2)(NSA__V x) {
    NSA__ARITHMETIC
    nsa_real lane[NSA__L];
#ifdef NSA__SCALEF /* of any x: -inf gives 0, what is too large gives inf */
    if (sizeof(nsa_real) == sizeof(float)) {
        NSA__V e, p;
        NSA__NEAREST(e, x);
        p = NSA__T(exp2_of_fraction)(x - e);
        NSA__SCALEF(p, e);
        return p;
    }
#elif NSA__BYTES
    /* Numbers from 2^23 on are whole, so x + 1.5 2^23 is rounded to the integer nearest to x: e
       stands in its lowest bits, and the sum less 1.5 2^23 is e. The bits of 2^r plus e << 23 are
       2^r 2^e, because e is added to the exponent. x is cut at -127, where the exponent becomes 0
       and the result 0. NaN stays NaN: the NaN that arithmetic makes has no low bits. */
    if (sizeof(nsa_real) == sizeof(float)) {
        x = NSA__T(greater)(NSA__T(splat)(-127), x);
        const NSA__V whole = NSA__T(splat)(12582912), e = x + whole, r = x - (e - whole);
        const NSA__V p = NSA__T(exp2_of_fraction)(r);
        return (NSA__V)((NSA__T(bits))p + ((NSA__T(bits))e << 23));
    }
#endif
    memcpy(lane, &x, sizeof x);
    for (int j = 0; j < NSA__L; j++) lane[j] = nsa__exp2(lane[j]);
    memcpy(&x, lane, sizeof x);
    return x;
}

/* e^-x, with e^-least for what is smaller. NaN stays NaN. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(exp_minus)(NSA__V x, nsa_real least) {
    NSA__ARITHMETIC
    return NSA__T(exp2)(NSA__T(greater)(NSA__T(splat)(least), x) *
                        NSA__T(splat)((nsa_real)-NSA__LOG2E));
}

/* The largest lane, by halves. */
NSA__INLINE NSA__TARGET nsa_real NSA__T(largest)(NSA__V x) {
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    memcpy(&lane, order, sizeof lane);
    for (int half = NSA__L / 2; half; half /= 2)
        x = NSA__T(greater)(x, __builtin_shuffle(x, lane ^ half));
    return x[0];
#else
    nsa_real lane[NSA__LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = NSA__L / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] = lane[j] > lane[j + half] ? lane[j] : lane[j + half];
    return lane[0];
#endif
}
#endif

/* Where the rows of a piece are in the result. */
NSA__INLINE NSA__TARGET void NSA__T(piece_rows)(int rows, const nsa__product *x, int first,
                                                nsa_real *c[NSA__NARROW]) {
    nsa_real *at = x->c->data + x->column;
    const int *of_c = x->c->rows;
    if (of_c)
        of_c += first;
    else
        at += first * x->c->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) c[i] = at + (of_c ? of_c[i] : i) * x->c->row;
}

/* Writes a piece. The two kinds of result are apart, because GCC would test for them between any
   two vectors. */
NSA__INLINE NSA__TARGET void NSA__T(piece_end)(int rows, int vectors,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__product *x, int first) {
    NSA__ARITHMETIC
    nsa_real *c[NSA__NARROW];
    NSA__T(piece_rows)(rows, x, first, c);
    if (x->c->scale) {
        const nsa_real *of_row = x->c->scale + first;
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            const NSA__V scale = NSA__T(splat)(of_row[i]);
            NSA__UNROLL
            for (int j = 0; j < vectors; j++)
                NSA__TO(c[i] + j * NSA__L) = sum[i][j] + scale * NSA__FROM(c[i] + j * NSA__L);
        }
        return;
    }
    if (NSA__OF_PAIRS && !x->c->add) {
        const NSA__V factor = NSA__T(splat)(x->factor);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] *= factor;
        }
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__TO(c[i] + j * NSA__L) = sum[i][j];
    }
}

/* A step of the sums: a column of a times a row of b. */
NSA__INLINE NSA__TARGET void NSA__T(piece_step)(int rows, int vectors,
                                                NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                const nsa__packed *a[NSA__NARROW], ptrdiff_t at,
                                                const nsa__packed *b_row) {
    NSA__ARITHMETIC
    NSA__V of_b[NSA__VECTORS];
    NSA__UNROLL
    for (int j = 0; j < vectors; j++) {
        of_b[j] = NSA__FROM(b_row + j * NSA__L);
        NSA__KEEP_IN_REGISTER(of_b[j]); /* or each of the multiply-adds would load it again */
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        const NSA__V of_a = NSA__T(of_left)(a[i] + at);
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__DOT(sum[i][j], of_a, of_b[j]);
    }
    /* of a lone chain GCC, if it tunes for some machines, would make products and sums */
    if (rows * vectors == 1) NSA__KEEP_IN_REGISTER(sum[0][0]);
}

/* sum += a b: every element is one chain of multiply-adds over ascending k, whatever the piece, so
   its bits depend on its own row and column alone. `listed`, a constant: b has rows. */
NSA__INLINE NSA__TARGET void NSA__T(piece_sum)(int rows, int vectors, int listed,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__packed *a[NSA__NARROW],
                                               const nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b = x->b->data + x->column;
    const int *b_rows = x->b->rows;
    ptrdiff_t at = 0, b_at = 0;
    for (int p = 0, k = x->k; p < k; p++, at += step, b_at += row)
        NSA__T(piece_step)(rows, vectors, sum, a, at, b + (listed ? b_rows[p] * row : b_at));
}

/* The same, and in each step a line of what is read later. */
NSA__INLINE NSA__TARGET void NSA__T(piece_sum_later)(int rows, int vectors,
                                                     NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                     const nsa__packed *a[NSA__NARROW],
                                                     nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b_row = x->b->data + x->column;
    ptrdiff_t at = 0;
    for (int left = x->k, n; left > 0; left -= n) {
        while (!x->later->n) x->later++;
        nsa__lines *lines = x->later;
        n = left < lines->n ? left : lines->n;
        for (int p = 0; p < n; p++, at += step, b_row += row) {
            NSA__PREFETCH(lines->at + (ptrdiff_t)p * 64, 2);
            NSA__T(piece_step)(rows, vectors, sum, a, at, b_row);
        }
        if (lines->n == INT_MAX) continue; /* those without end are the same each time */
        lines->at += (ptrdiff_t)n * 64;
        lines->n -= n;
    }
}

/* A piece of c in registers: rows x vectors and `later`, constants once this is inlined. With `add`
   alone its chains begin with the c that is there. With `scale` they begin with 0 and scale c is
   added at the end. Softmax adds many tiles to a row: a chain for each tile rounds less than one
   chain through all of them. */
NSA__INLINE NSA__TARGET void NSA__T(piece)(int rows, int vectors, int later, nsa__product *x,
                                           int first) {
    NSA__V sum[NSA__NARROW][NSA__VECTORS];
    const NSA__V zero = NSA__T(splat)(0);
    const nsa__packed *a[NSA__NARROW], *a_first = x->a->data;
    const int *of_a = x->a->rows;
    nsa_real *c[NSA__NARROW];
    if (x->c->add && !x->c->scale) {
        NSA__T(piece_rows)(rows, x, first, c);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = NSA__FROM(c[i] + j * NSA__L);
        }
    } else {
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = zero;
        }
    }
    if (of_a)
        of_a += first;
    else
        a_first += first * x->a->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) a[i] = a_first + (of_a ? of_a[i] : i) * x->a->row;
    if (later)
        NSA__T(piece_sum_later)(rows, vectors, sum, a, x);
    else if (!NSA__OF_PAIRS && x->b->rows) /* see nsa__pairs */
        NSA__T(piece_sum)(rows, vectors, 1, sum, a, x);
    else
        NSA__T(piece_sum)(rows, vectors, 0, sum, a, x);
    NSA__T(piece_end)(rows, vectors, sum, x, first);
}

/* Rows i .. m - 1 in pieces of one vector, and of NSA__VECTORS. These are functions, as in one they
   would have too few registers, and clang holds the sums of narrow ones in memory. */
#define NSA__PIECE(name, n, vectors, later)                                              \
    NSA__TARGET NSA__NOINLINE static void NSA__T(name)(nsa__product * x, int i, int m) { \
        for (; i < m; i += n) NSA__T(piece)(n, vectors, later, x, i);                    \
    }
#define NSA__PIECES(n)             \
    NSA__PIECE(narrow##n, n, 1, 0) \
    NSA__PIECE(wide##n, n, NSA__VECTORS, 0)
NSA__PIECES(1)
NSA__PIECES(2)
NSA__PIECES(3)
NSA__PIECES(4)
#if NSA__ROWS > 4
NSA__PIECES(5)
NSA__PIECES(6)
#endif
#if NSA__NARROW > 6
NSA__PIECE(narrow7, 7, 1, 0)
NSA__PIECE(narrow8, 8, 1, 0)
#endif
NSA__PIECE(narrow_later, NSA__NARROW, 1, 1)
NSA__PIECE(wide_later, NSA__ROWS, NSA__VECTORS, 1)
static nsa__pieces *const NSA__T(pieces)[NSA__NARROW][2] = {
    {NSA__T(narrow1), NSA__T(wide1)}, {NSA__T(narrow2), NSA__T(wide2)},
    {NSA__T(narrow3), NSA__T(wide3)}, {NSA__T(narrow4), NSA__T(wide4)},
#if NSA__ROWS > 4
    {NSA__T(narrow5), NSA__T(wide5)}, {NSA__T(narrow6), NSA__T(wide6)},
#endif
#if NSA__NARROW > 6
    {NSA__T(narrow7), NULL},          {NSA__T(narrow8), NULL},
#endif
};

/* The columns that whole vectors hold, in pieces of NSA__VECTORS, then in single vectors. The last
   two pieces of m rows share what is left, because one of few rows waits for its own sums. Returns
   how many columns these are. */
NSA__TARGET static int NSA__T(product)(int m, int n, nsa__product *x) {
    for (int wide = 1; wide >= 0; wide--) {
        const int columns = wide ? NSA__VECTORS * NSA__L : NSA__L;
        const int most = wide ? NSA__ROWS : NSA__NARROW, rest = m % most;
        const int shared = rest && m > most ? most + rest : rest;
        nsa__pieces *const later = wide ? NSA__T(wide_later) : NSA__T(narrow_later);
        nsa__pieces *const whole = x->later ? later : NSA__T(pieces)[most - 1][wide];
        for (; x->column + columns <= n; x->column += columns) {
            whole(x, 0, m - shared);
            for (int i = m - shared, rows; i < m; i += rows) {
                rows = m - i > most ? (m - i + 1) / 2 : m - i;
                NSA__T(pieces)[rows - 1][wide](x, i, i + rows);
            }
        }
    }
    return x->column;
}

#if !NSA__OF_PAIRS
/* What no vector holds is the same chain of multiply-adds one by one, so an element has the same
   bits wherever it stands. */
NSA__TARGET static void NSA__T(gemm)(int m, int n, int k, const nsa__matrix *a,
                                     const nsa__matrix *b, const nsa__result *c) {
    NSA__ARITHMETIC
    nsa__product x = {k, 0, a, b, c, 1, c->later};
    for (int j = NSA__T(product)(m, n, &x); j < n; j++)
        for (int i = 0; i < m; i++) {
            const nsa__packed *a_row = a->data + (a->rows ? a->rows[i] : i) * a->row;
            nsa_real *to = c->data + (c->rows ? c->rows[i] : i) * c->row + j;
            nsa_real sum = c->add && !c->scale ? *to : 0;
            for (int p = 0; p < k; p++) {
                sum += a_row[p * a->step] * b->data[(b->rows ? b->rows[p] : p) * b->row + j];
                NSA__KEEP_IN_REGISTER(sum); /* as in a piece */
            }
            *to = c->scale ? sum + c->scale[i] * *to : sum;
        }
}

/* Three loops over the rows: the maxima, the shrinks of all rows as vectors, then p and the sums.
   See nsa__tiles for the arguments. A mask of ones, which most tiles have, needs no picking. */
NSA__TARGET static void NSA__T(softmax)(const nsa__scored *scored, ptrdiff_t ld, nsa_real *s,
                                        ptrdiff_t ld_p, nsa_real *p, const nsa__running *so_far) {
    NSA__ARITHMETIC
    const int rows = scored->rows, n = scored->n, *row = scored->row;
    nsa_real *m = so_far->m, *l = so_far->l, *shrink = so_far->shrink;
    const NSA__V lowest = NSA__T(splat)(NSA__LOWEST), log2e = NSA__T(splat)((nsa_real)NSA__LOG2E);
    for (int r = 0; r < rows; r++) { /* the largest so far; masked scores become the lowest */
        const uint64_t seen = scored->mask[r / scored->group];
        nsa_real *x = s + r * ld;
        NSA__V most = lowest;
        for (int j = 0; j < n; j += NSA__L) {
            if (seen != ~(uint64_t)0)
                NSA__TO(x + j) =
                    NSA__T(pick)(NSA__T(seen)(seen, scored->first + j), NSA__FROM(x + j), lowest);
            most = NSA__T(greater)(NSA__FROM(x + j), most);
        }
        const nsa_real largest = NSA__T(largest)(most);
        nsa_real *highest = m + row[r];
        shrink[r] = *highest;
        *highest = largest > *highest ? largest : *highest;
        shrink[r] -= *highest;
    }
    /* shrink = exp(the maximum before - the maximum now) */
    for (int r = 0; r < rows; r += NSA__L)
        NSA__TO(shrink + r) = NSA__T(exp2)(NSA__FROM(shrink + r) * log2e);
    /* p, and the sums. A row that has seen no key subtracts 0 and gets p = exp(lowest) = 0, which
       lowest - lowest = 0 would make 1. Key j adds to partial sum j % 16, for vectors of any width.
     */
    for (int r = 0; r < rows; r++) {
        const NSA__V most = NSA__T(splat)(m[row[r]] == NSA__LOWEST ? 0 : m[row[r]]);
        const nsa_real *x = s + r * ld;
        nsa_real *to = p + r * ld_p, *sum = l + (ptrdiff_t)row[r] * NSA__LANES;
        for (int j = 0; j < NSA__LANES; j += NSA__L) {
            NSA__V of_lane = NSA__FROM(sum + j) * NSA__T(splat)(shrink[r]);
            for (int at = j; at < n; at += NSA__LANES) {
                const NSA__V e = NSA__T(exp2)((NSA__FROM(x + at) - most) * log2e);
                NSA__TO(to + at) = e;
                of_lane += e;
            }
            NSA__TO(sum + j) = of_lane;
        }
    }
}

/* p = exp(s - lse), at most 1 though lse be another program's, and ds = p (dp - delta), where delta
   is dout . out - dlse. s and dp are overwritten. */
NSA__TARGET static void NSA__T(gradient)(const nsa__scored *x, ptrdiff_t ld, const nsa_real *lse,
                                         const nsa_real *delta, nsa_real *s, nsa_real *dp) {
    NSA__ARITHMETIC
    const int n = x->n, *row = x->row;
    for (int r = 0; r < x->rows; r++) {
        const uint64_t seen = x->mask[r / x->group];
        const NSA__V of_sum = NSA__T(splat)(lse[row[r]]), of_row = NSA__T(splat)(delta[row[r]]);
        const NSA__V zero = NSA__T(splat)(0);
        for (int j = 0; j < n; j += NSA__L) {
            NSA__V p = NSA__T(exp_minus)(of_sum - NSA__FROM(s + r * ld + j), 0);
            NSA__V ds = p * (NSA__FROM(dp + r * ld + j) - of_row);
            if (seen != ~(uint64_t)0) { /* ds too: what is masked may overflow, and 0 inf is NaN */
                const NSA__I on = NSA__T(seen)(seen, x->first + j);
                p = NSA__T(pick)(on, p, zero);
                ds = NSA__T(pick)(on, ds, zero);
            }
            NSA__TO(s + r * ld + j) = p;
            NSA__TO(dp + r * ld + j) = ds;
        }
    }
}

/* Eq. 8 and 10: p_cmp of each key, summed over the heads of a group, for one query. */
NSA__TARGET static void NSA__T(probability)(int rows, int n, ptrdiff_t ld, const nsa_real *lse,
                                            const nsa_real *s, nsa_real *sum) {
    NSA__ARITHMETIC
    /* A caller of nsa_select_blocks may give another lse than that of s, and p of a number is wrong
       then but neither negative nor NaN. */
    for (int j = 0; j < n; j += NSA__L) {
        NSA__V p = NSA__T(splat)(0);
        for (int r = 0; r < rows; r++)
            p += NSA__T(exp_minus)(NSA__T(splat)(lse[r]) - NSA__FROM(s + r * ld + j), -87);
        NSA__TO(sum + j) = p;
    }
}

/* How many x, as integers, are at least `least`: a compare makes -1 of true, which is
   subtracted. */
NSA__TARGET static int NSA__T(at_least)(int n, const nsa_real *x, nsa__lane least) {
    int j = 0, sum = 0;
#if NSA__BYTES
    nsa__lane lane[NSA__L];
    NSA__I count = {0};
    const NSA__I bound = count + least;
    for (; j + NSA__L <= n; j += NSA__L)
        count -= (NSA__I)NSA__FROM(x + j) >= bound; /* true is -1 */
    memcpy(lane, &count, sizeof count);
    for (int i = 0; i < NSA__L; i++) sum += (int)lane[i];
#endif
    for (; j < n; j++) {
        nsa__lane bits;
        memcpy(&bits, x + j, sizeof bits);
        sum += bits >= least;
    }
    return sum;
}

NSA__TARGET static int NSA__T(all_finite)(int rows, int n, ptrdiff_t ld, const nsa_real *x) {
    NSA__T(bits) bits, carry = {0};
    nsa__bits_t lane[NSA__L], sum = 0;
    for (int r = 0; r < rows; r++, x += ld)
        for (int j = 0; j < n; j += NSA__L) {
            memcpy(&bits, x + j, sizeof bits);
            carry |= NSA__EXPONENT_CARRY(bits);
        }
    memcpy(lane, &carry, sizeof carry);
    for (int j = 0; j < NSA__L; j++) sum |= lane[j];
    return !(sum & NSA__SIGN);
}

NSA__TARGET static void NSA__T(widen)(int rows, int n, const nsa_tensor *x, const void *row,
                                      ptrdiff_t ld, nsa_real *to) {
    const nsa_dtype dtype = x->dtype;
    const ptrdiff_t bytes = (ptrdiff_t)nsa__dtype_bytes(dtype);
    const ptrdiff_t apart = rows > 1 ? (ptrdiff_t)x->token * bytes : 0; /* of one row: anything */
    const char *from = (const char *)row;
    for (int r = 0; r < rows; r++, to += ld) {
        int j = 0;
        if (r) from += apart;
#if defined(NSA__OF_F16) && NSA__REAL_BITS(NSA_REAL) == 32 && (defined(__clang__) || __GNUC__ > 8)
        for (; dtype == NSA_F16 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(halves) numbers;
            NSA__V reals;
            memcpy(&numbers, from + j * bytes, sizeof numbers);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals;
        }
        for (; dtype == NSA_F8 && j + NSA__L <= n; j += NSA__L) { /* as nsa__from_f8 */
            NSA__T(eighths) codes;
            NSA__V reals;
            memcpy(&codes, from + j, sizeof codes);
            const NSA__T(halves) code = __builtin_convertvector(codes, NSA__T(halves));
            const NSA__T(halves) numbers = (code & 0x80) << 8 | (code & 0x7f) << 7 |
                                           ((NSA__T(halves))((code & 0x7f) == 0x7f) & 0x7c00);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals * 256 * NSA__T(splat)(nsa__row_scale(from, n, j));
        }
#endif
        nsa__widen(to, dtype, from, j, n);
    }
}

NSA__TARGET static void NSA__T(scale)(int n, nsa_real factor, const nsa_real *x, nsa_real *to) {
    for (int j = 0; j < n; j += NSA__L) NSA__TO(to + j) = NSA__T(splat)(factor) * NSA__FROM(x + j);
}

NSA__TARGET static void NSA__T(join)(int rows, int n, const nsa_real *x, const nsa__result *c) {
    NSA__ARITHMETIC
    for (int r = 0; r < rows; r++, x += n) {
        const NSA__V scale = NSA__T(splat)(c->scale[r]);
        nsa_real *to = c->data + (c->rows ? c->rows[r] : r) * c->row;
        for (int j = 0; j < n; j += NSA__L)
            NSA__TO(to + j) = NSA__FROM(x + j) + scale * NSA__FROM(to + j);
    }
}

NSA__TARGET static void NSA__T(gate)(int n, const nsa_real g[3], const nsa_real *const x[3],
                                     nsa_real *to) {
    NSA__ARITHMETIC
    const NSA__V a = NSA__T(splat)(g[0]), b = NSA__T(splat)(g[1]), c = NSA__T(splat)(g[2]);
    for (int j = 0; j < n; j += NSA__L)
        NSA__TO(to + j) =
            a * NSA__FROM(x[0] + j) + b * NSA__FROM(x[1] + j) + c * NSA__FROM(x[2] + j);
}

/* Blocks of NSA__L x NSA__L, then single columns, which are cheaper than a block if they are few. A
   step exchanges the halves that are off the diagonal, of the block, then of its quarters, and so
   on. */
NSA__TARGET static void NSA__T(transpose)(int rows, int columns, ptrdiff_t ld, const nsa_real *x,
                                          ptrdiff_t ld_to, nsa_real *to) {
    int c = 0, most = columns;
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    NSA__V block[NSA__L];
    memcpy(&lane, order, sizeof lane);
    for (; c + NSA__L / 4 < columns; c += NSA__L)
        for (int r = 0; r < rows; r += NSA__L) {
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++) block[i] = NSA__FROM(x + (r + i) * ld + c);
            NSA__UNROLL
            for (int half = NSA__L / 2; half; half /= 2) {
                /* lanes below `half`, then those from `half` on, of two rows */
                const NSA__I low = lane + (((lane & half) != 0) & (NSA__L - half)),
                             high = low + half;
                NSA__UNROLL
                for (int i = 0; i < NSA__L; i++)
                    if (!(i & half)) {
                        const NSA__V a = block[i], b = block[i + half];
                        block[i] = __builtin_shuffle(a, b, low);
                        block[i + half] = __builtin_shuffle(a, b, high);
                    }
            }
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++)
                if (c + i < columns) NSA__TO(to + (c + i) * ld_to + r) = block[i];
        }
    most = NSA__L / 4;
#endif
    /* what is left is counted too: GCC 10 warns that c might pass 2^31, where no column is left */
    for (int i = 0; i < most && c < columns; i++, c++)
        for (int r = 0; r < rows; r++) to[c * ld_to + r] = x[r * ld + c];
}

static const nsa__tiles NSA__T(tiles) = {NSA__T(gemm),      NSA__T(softmax),    NSA__T(probability),
                                         NSA__T(at_least),  NSA__T(all_finite), NSA__T(widen),
                                         NSA__T(scale),     NSA__T(join),       NSA__T(gate),
                                         NSA__T(transpose), NSA__T(gradient)};

#undef NSA__PIECE
#undef NSA__PIECES
#undef NSA__ISA
#undef NSA__BYTES
#undef NSA__ROWS
#undef NSA__NARROW
#undef NSA__VECTORS
#undef NSA__TARGET
#undef NSA__KEEP_IN_REGISTER
#undef NSA__MAX
#undef NSA__NEAREST
#undef NSA__SCALEF
#undef NSA__OF_F16
#undef NSA__DOT
#undef NSA__ROUND
#undef NSA__OF_HALVES
#undef NSA__OF_PAIRS
#endif
