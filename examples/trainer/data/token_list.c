/* token_list.c - see token_list.h. */
#include "data/token_list.h"

#include <stdlib.h>

#include "base/memory.h"

bool token_list_push(token_list *list, int32_t id) {
    if (list->count == list->room) {
        fault unused;
        size_t used = list->count * sizeof *list->ids;
        size_t room = memory_grow("tokens", used, 1024 * sizeof *list->ids, &unused);
        int32_t *more = room ? realloc(list->ids, room) : NULL;
        if (!more) return false;
        list->ids = more;
        list->room = room / sizeof *more;
    }
    list->ids[list->count++] = id;
    return true;
}

void token_list_free(token_list *list) {
    token_list empty = {NULL, 0, 0};
    free(list->ids);
    *list = empty;
}
