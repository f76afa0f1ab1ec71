/* bulk.cpp: copies of whole pieces and of boxes of tensors, counted by an mbarrier or by groups.
   Twin: the sm_90 bulk copy unit (TMA) and cuTensorMapEncodeTiled. Not here: im2col maps, clusters,
   multicast, reductions.

   A load lands when no thread of the block can run (or at once: settings.early; or at a random
   moment: order::random); a store when its thread waits for its group. */
#include "async.h"
#include "checker.h"
#include "groups.h"
#include "memory.h"

#include <deque>
#include <vector>

namespace simt {
namespace {

/* Up to 16 bytes that stay together. global == nullptr: outside of the tensor. */
struct piece {
    unsigned char *shared;
    unsigned char *global;
    unsigned bytes;
};

struct transfer {
    std::vector<piece> pieces;
    int64_t bytes;
    int thread;
    uint32_t epoch;
    uint64_t *bar; /* loads */
    site at;
};

/* The one being put together; no thread's own, for a thread that fails is left where it stands. */
transfer building;

transfer &begin_building(uint64_t *bar, site at) {
    building.pieces.clear();
    building.bytes = 0;
    building.bar = bar;
    building.at = at;
    return building;
}

std::deque<transfer> loads;
thread_groups<transfer> stores;

void move_in(const transfer &t) {
    for (const piece &p : t.pieces) {
        if (p.global)
            memcpy(p.shared, p.global, p.bytes);
        else
            memset(p.shared, 0, p.bytes);
    }
}

void move_out(const transfer &t) {
    for (const piece &p : t.pieces)
        if (p.global) memcpy(p.global, p.shared, p.bytes);
}

void land_load(const transfer &t, bool moved) {
    for (const piece &p : t.pieces) check_bulk_land(p.shared, p.bytes, t.thread, t.epoch, t.at);
    if (!moved) move_in(t);
    mbarrier_complete(t.bar, t.bytes, t.thread, t.epoch, t.at);
}

void check_piece(const piece &p, const char *name, site at) {
    if (!shared_owns(p.shared, p.bytes))
        fail(at, text("%s outside shared memory: ", name) + describe(p.shared));
    if (p.global && !device_owns(p.global, p.bytes))
        fail(at, text("%s outside device memory: ", name) + describe(p.global));
}

void issue_load(transfer &t, const char *name) {
    mbarrier_check(t.bar, name, t.at);
    for (const piece &p : t.pieces) check_piece(p, name, t.at);
    t.thread = the.current->number;
    t.epoch = check_bulk_epoch();
    for (const piece &p : t.pieces) check_bulk_issue(p.shared, p.global, p.bytes, t.at);
    check_bulk_issued();
    the.counted.async_bytes += static_cast<uint64_t>(t.bytes);
    if (config().early) {
        move_in(t);
        land_load(t, true);
    } else {
        loads.push_back(std::move(t));
    }
}

/* ---- Tensor maps -------------------------------------------------------------------------- */

/* What the executor's cuTensorMapEncodeTiled writes into the 128 opaque bytes. */
struct tiled_map {
    uint64_t mark;
    unsigned char *base;
    uint64_t dims[5];
    uint64_t strides[4]; /* bytes; of the dimensions after the innermost */
    uint16_t box[5];
    uint8_t rank, element_bytes, swizzle; /* swizzle: width in 16-byte chunks, 1, 2, 4, 8 */
};
constexpr uint64_t map_mark = 0x746d617020736d74ull;
static_assert(sizeof(tiled_map) <= sizeof(CUtensorMap), "fits the opaque type");

const tiled_map &checked_map(const CUtensorMap *map, int rank, const char *name, site at) {
    const tiled_map &m = *reinterpret_cast<const tiled_map *>(map);
    if (m.mark != map_mark) fail(at, text("%s: not a map that cuTensorMapEncodeTiled made", name));
    if (m.rank != rank)
        fail(at, text("%s of %d coordinates: the map has %d dimensions", name, rank, m.rank));
    return m;
}

size_t alignment_of(const tiled_map &m) {
    return m.swizzle == 1 ? 128 : 128u * m.swizzle;
}

/* Bits 4.. of a shared address xor bits 7.. (1, 2 or 3 of them). */
unsigned char *swizzled(unsigned char *p, unsigned chunks) {
    const size_t a = reinterpret_cast<size_t>(p);
    return reinterpret_cast<unsigned char *>(a ^ ((a >> 7 & (chunks - 1)) << 4));
}

/* The pieces of one row of the box; `at` is its first element. */
void add_row(std::vector<piece> &pieces, const tiled_map &m, const int64_t *at,
             unsigned char *shared) {
    bool outside = false;
    unsigned char *row = m.base;
    for (int d = 1; d < m.rank; d++) {
        outside = outside || at[d] < 0 || at[d] >= static_cast<int64_t>(m.dims[d]);
        if (!outside) row += static_cast<uint64_t>(at[d]) * m.strides[d - 1];
    }
    const int64_t size = m.element_bytes, row_bytes = m.box[0] * size;
    const int64_t first = at[0] * size, end = static_cast<int64_t>(m.dims[0]) * size;
    for (int64_t i = 0; i < row_bytes; i += 16) {
        unsigned char *to = swizzled(shared + i, m.swizzle);
        if (!outside && first + i >= 0 && first + i + 16 <= end) {
            pieces.push_back({to, row + first + i, 16});
            continue;
        }
        for (int64_t e = i; e < i + 16; e += size) { /* an edge runs through these 16 bytes */
            const bool inside = !outside && first + e >= 0 && first + e < end;
            pieces.push_back(
                {to + (e - i), inside ? row + first + e : nullptr, static_cast<unsigned>(size)});
        }
    }
}

void add_box(std::vector<piece> &pieces, const tiled_map &m, const int *coordinates,
             unsigned char *shared) {
    uint64_t rows = 1;
    for (int d = 1; d < m.rank; d++) rows *= m.box[d];
    const size_t row_bytes = size_t(m.box[0]) * m.element_bytes;
    for (uint64_t r = 0; r < rows; r++) {
        int64_t at[5] = {coordinates[0]};
        uint64_t rest = r;
        for (int d = 1; d < m.rank; d++) {
            at[d] = coordinates[d] + static_cast<int64_t>(rest % m.box[d]);
            rest /= m.box[d];
        }
        add_row(pieces, m, at, shared + r * row_bytes);
    }
}

transfer &box_transfer(const CUtensorMap *map, const int *coordinates, int rank, const void *shared,
                       uint64_t *bar, const char *name, site at) {
    require_thread(name, at);
    const tiled_map &m = checked_map(map, rank, name, at);
    if (reinterpret_cast<size_t>(shared) % alignment_of(m) != 0)
        fail(at, text("%s: the shared address must be a multiple of %zu", name, alignment_of(m)));
    transfer &t = begin_building(bar, at);
    add_box(t.pieces, m, coordinates, static_cast<unsigned char *>(const_cast<void *>(shared)));
    for (const piece &p : t.pieces) t.bytes += p.bytes;
    return t;
}

} // namespace

/* ---- What kernels call -------------------------------------------------------------------- */

void bulk_load(void *shared, const void *global, int bytes, uint64_t *bar, site at) {
    const char *name = "cp.async.bulk";
    require_thread(name, at);
    if (bytes <= 0 || bytes % 16 != 0 || reinterpret_cast<size_t>(shared) % 16 != 0 ||
        reinterpret_cast<size_t>(global) % 16 != 0)
        fail(at,
             text("cp.async.bulk of %d bytes: size and addresses must be multiples of 16", bytes));
    transfer &t = begin_building(bar, at);
    t.bytes = bytes;
    auto *to = static_cast<unsigned char *>(shared);
    auto *from = static_cast<unsigned char *>(const_cast<void *>(global));
    for (int i = 0; i < bytes; i += 16) t.pieces.push_back({to + i, from + i, 16});
    issue_load(t, name);
}

void tensor_load(void *shared, const CUtensorMap *map, const int *coordinates, int rank,
                 uint64_t *bar, site at) {
    const char *name = "cp.async.bulk.tensor load";
    issue_load(box_transfer(map, coordinates, rank, shared, bar, name, at), name);
}

void tensor_store(const CUtensorMap *map, const int *coordinates, int rank, const void *shared,
                  site at) {
    const char *name = "cp.async.bulk.tensor store";
    transfer &t = box_transfer(map, coordinates, rank, shared, nullptr, name, at);
    for (const piece &p : t.pieces) {
        check_piece(p, name, at);
        check_async_read(p.shared, p.bytes, at);
        if (p.global) check_access_if_on(access::write, p.global, p.bytes, at);
        check_hold(p.shared, p.bytes, 1, at);
    }
    if (config().early) move_out(t);
    stores.add(std::move(t));
}

void bulk_commit(site at) {
    require_thread("cp.async.bulk.commit_group", at);
    stores.commit();
}

void bulk_wait(int pending, site at) {
    require_thread("cp.async.bulk.wait_group", at);
    stores.wait(pending, [at](const transfer &t) {
        if (!config().early) move_out(t);
        for (const piece &p : t.pieces) {
            check_hold(p.shared, p.bytes, -1, at);
            check_async_read(p.shared, p.bytes, at);
        }
    });
}

/* ---- The executor's side ------------------------------------------------------------------ */

void bulk_begin() {
    loads.clear();
    stores.begin();
}

bool bulk_land_one() {
    if (loads.empty()) return false;
    size_t which = 0;
    if (the.schedule == order::reversed) which = loads.size() - 1;
    if (the.schedule == order::random) which = random_number() % loads.size();
    static transfer t; /* not the thread's: see `building` */
    t = std::move(loads[which]);
    loads.erase(loads.begin() + static_cast<std::ptrdiff_t>(which));
    land_load(t, false);
    return true;
}

void bulk_end() {
    if (!loads.empty())
        note(place(loads[0].at) + ": the block ended before this bulk copy was waited for");
    stores.end("bulk store");
}

} // namespace simt

/* ---- The driver's function that makes a map ------------------------------------------------ */

static size_t element_size(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
        return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
        return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

/* Its limits are those that the driver's documentation gives for tiled maps. */
extern "C" CUresult CUDAAPI cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *dims,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill fill) {
    const size_t size = element_size(type);
    if (!map || !size || rank < 1 || rank > 5 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B ||
        reinterpret_cast<size_t>(base) % 16 != 0 || reinterpret_cast<size_t>(map) % 64 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    simt::tiled_map m = {};
    m.mark = simt::map_mark;
    m.base = static_cast<unsigned char *>(base);
    m.rank = static_cast<uint8_t>(rank);
    m.element_bytes = static_cast<uint8_t>(size);
    m.swizzle = static_cast<uint8_t>(1u << swizzle);
    for (cuuint32_t d = 0; d < rank; d++) {
        if (dims[d] == 0 || dims[d] > uint64_t(1) << 32 || box[d] == 0 || box[d] > 256 ||
            element_strides[d] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        if (d && (strides[d - 1] % 16 != 0 || strides[d - 1] >= uint64_t(1) << 40))
            return CUDA_ERROR_INVALID_VALUE;
        m.dims[d] = dims[d];
        m.box[d] = static_cast<uint16_t>(box[d]);
        if (d) m.strides[d - 1] = strides[d - 1];
    }
    const size_t row = box[0] * size;
    if (row % 16 != 0 || (m.swizzle > 1 && row > 16u * m.swizzle)) return CUDA_ERROR_INVALID_VALUE;
    memset(static_cast<void *>(map), 0, sizeof *map);
    memcpy(static_cast<void *>(map), &m, sizeof m);
    return CUDA_SUCCESS;
}
