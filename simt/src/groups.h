/* groups.h: what each thread of a block has begun, in groups that it commits and waits for: copies
   by cp.async, bulk stores. Twin: commit_group and wait_group. Not here: what a member moves. */
#ifndef SIMT_GROUPS_H
#define SIMT_GROUPS_H

#include "machine.h"

#include <deque>
#include <vector>

namespace simt {

template <typename member> class thread_groups {
    struct queue {
        std::vector<member> open;               /* not yet committed */
        std::deque<std::vector<member>> groups; /* committed, oldest first */
        bool is_used;                           /* in this block */
    };
    queue queues[max_threads];
    /* Threads of this block that have used their queues. An array, because a vector of int may grow
       by code of a kernel's file, which is watched. */
    int used[max_threads], used_count;

    queue &own() {
        const int me = the.current->number;
        queue &q = queues[me];
        if (!q.is_used) used[used_count++] = me;
        q.is_used = true;
        return q;
    }

  public:
    void add(member m) { own().open.push_back(std::move(m)); }

    void commit() {
        queue &q = own();
        q.groups.emplace_back(std::move(q.open));
        q.open.clear();
    }

    /* The thread's oldest groups go to land(member), until `pending` are left. */
    template <typename function> void wait(int pending, function land) {
        queue &q = queues[the.current->number];
        while (q.groups.size() > static_cast<size_t>(pending)) {
            for (const member &m : q.groups.front()) land(m);
            q.groups.pop_front();
        }
    }

    void begin() {
        while (used_count) {
            queue &q = queues[used[--used_count]];
            q.open.clear();
            q.groups.clear();
            q.is_used = false;
        }
    }

    /* The block is over: notes what was not waited for. */
    void end(const char *name) const {
        for (int i = 0; i < the.thread_count; i++) {
            const queue &q = queues[i];
            for (const auto &group : q.groups)
                if (!group.empty())
                    note(place(group[0].at) +
                         text(": %s of thread %d was never waited for", name, i));
            if (!q.open.empty())
                note(place(q.open[0].at) + text(": %s of thread %d was never committed", name, i));
        }
    }
};

} // namespace simt

#endif
