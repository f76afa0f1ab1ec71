/* events.c - see events.h. The format is public (TensorFlow's record_writer, event.proto and
   summary.proto): a record is its length in 8 bytes, their CRC, the data, their CRC,
   little-endian. */
#include "telemetry/events.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/files.h"

enum { MESSAGE_BYTES = 4096 };

/* ---- Records ---- */

/* CRC-32C (Castagnoli), bit by bit: a record has a few hundred bytes. */
static uint32_t crc32c(const unsigned char *bytes, size_t count) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static uint32_t masked_crc(const unsigned char *bytes, size_t count) {
    uint32_t crc = crc32c(bytes, count);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static void put_little(unsigned char *to, uint64_t x, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (unsigned char)(x >> 8 * i);
}

static bool write_record(events *e, const unsigned char *data, size_t count, fault *f) {
    unsigned char head[12], tail[4];
    put_little(head, count, 8);
    put_little(head + 8, masked_crc(head, 8), 4);
    put_little(tail, masked_crc(data, count), 4);
    fwrite(head, 1, sizeof head, e->file);
    fwrite(data, 1, count, e->file);
    fwrite(tail, 1, sizeof tail, e->file);
    if (!fflush(e->file) && !ferror(e->file)) return true;
    fault_errno(f, "%s: cannot write", e->path);
    clearerr(e->file);
    return false;
}

/* ---- Messages ---- */

typedef struct message {
    unsigned char bytes[MESSAGE_BYTES];
    size_t count;
} message;

static void put_byte(message *m, unsigned x) {
    if (m->count < MESSAGE_BYTES) m->bytes[m->count] = (unsigned char)x;
    m->count++; /* one that does not fit is refused as a whole */
}

static void put_varint(message *m, uint64_t x) {
    for (; x > 127; x >>= 7) put_byte(m, (unsigned)(x & 127) | 128);
    put_byte(m, (unsigned)x);
}

static void put_fixed(message *m, uint64_t x, int bytes) {
    for (int i = 0; i < bytes; i++) put_byte(m, (unsigned)(x >> 8 * i) & 255);
}

enum { VARINT, FIXED64, BYTES, FIXED32 = 5 };

static void put_key(message *m, unsigned field, unsigned type) {
    put_byte(m, field << 3 | type);
}

static void put_bytes(message *m, unsigned field, const void *bytes, size_t count) {
    put_key(m, field, BYTES);
    put_varint(m, count);
    for (size_t i = 0; i < count; i++) put_byte(m, ((const unsigned char *)bytes)[i]);
}

/* Event: wall_time = 1, step = 2, file_version = 3, summary = 5. */
static void begin_event(message *m, int64_t step) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double wall = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    uint64_t bits;
    memcpy(&bits, &wall, sizeof bits);
    m->count = 0;
    put_key(m, 1, FIXED64);
    put_fixed(m, bits, 8);
    put_key(m, 2, VARINT);
    put_varint(m, (uint64_t)step);
}

/* Summary: value = 1; in it tag = 1, simple_value = 2. */
static void put_scalar(message *summary, const events_scalar *s) {
    message value = {.count = 0};
    float x = (float)s->value;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    put_bytes(&value, 1, s->tag, strlen(s->tag));
    put_key(&value, 2, FIXED32);
    put_fixed(&value, bits, 4);
    put_bytes(summary, 1, value.bytes, value.count);
}

/* ---- The file ---- */

/* Event: session_log = 7; in it status = 1, START = 1: readers drop older events from this step on.
   */
static bool write_start(events *e, int64_t first_step, fault *f) {
    message start = {.count = 0}, m;
    put_key(&start, 1, VARINT);
    put_varint(&start, 1);
    begin_event(&m, first_step);
    put_bytes(&m, 7, start.bytes, start.count);
    return write_record(e, m.bytes, m.count, f);
}

/* Seconds for the name: readers take the files in the order of these, so that they are above those
   of all before, whatever the clock says. */
static bool choose_time(const char *tb, long long *seconds, fault *f) {
    static const char begin[] = "events.out.tfevents.";
    files_list list;
    *seconds = (long long)time(NULL);
    if (!files_list_open(&list, tb, f)) return false;
    for (size_t i = 0; i < list.count; i++) {
        if (strncmp(list.names[i], begin, sizeof begin - 1)) continue;
        long long said = strtoll(list.names[i] + sizeof begin - 1, NULL, 10);
        if (said >= *seconds && said < 9999999999) *seconds = said + 1; /* of ten digits */
    }
    files_list_close(&list);
    return true;
}

bool events_open(events *e, const char *folder, int64_t first_step, fault *f) {
    char tb[1280], name[256], host[64] = "localhost";
    static const char version[] = "brain.Event:2";
    message m;
    long long seconds;
    e->file = NULL;
    gethostname(host, sizeof host - 1);
    if (!files_join(tb, sizeof tb, folder, "tb", f) || !files_make_folder(tb, f) ||
        !choose_time(tb, &seconds, f))
        return false;
    snprintf(name, sizeof name, "events.out.tfevents.%010lld.%s.%ld", seconds, host,
             (long)getpid());
    if (!files_join(e->path, sizeof e->path, tb, name, f)) return false;
    int fd = files_open_end(e->path, f);
    e->file = fd < 0 ? NULL : fdopen(fd, "ab");
    if (fd >= 0 && !e->file) close(fd), fault_set(f, "%s: out of memory", e->path);
    if (!e->file) return false;
    begin_event(&m, 0);
    put_bytes(&m, 3, version, sizeof version - 1);
    if (write_record(e, m.bytes, m.count, f) && write_start(e, first_step, f)) return true;
    events_close(e);
    return false;
}

void events_close(events *e) {
    if (e->file) fclose(e->file);
    e->file = NULL;
}

bool events_write(events *e, int64_t step, const events_scalar *scalars, int count, fault *f) {
    message summary = {.count = 0}, m;
    if (!e->file) return true;
    for (int i = 0; i < count; i++) put_scalar(&summary, &scalars[i]);
    begin_event(&m, step);
    if (summary.count + 32 > MESSAGE_BYTES)
        return fault_set(f, "%s: %d scalars in one record: too many", e->path, count);
    put_bytes(&m, 5, summary.bytes, summary.count);
    return write_record(e, m.bytes, m.count, f);
}
