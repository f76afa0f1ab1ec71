/* kernel.cpp: what is known of a kernel before it runs: its name, its static shared memory, and how
   much dynamic memory it has leave for.
   Twin: the symbols of a module and cudaFuncAttributes. Not here: the launch (launch.cpp).

   NSA_SHARED notes each array before main, under the name of a type local to the kernel:
   Z<kernel>E<length>nsa__array_<name>. A launch has the kernel's address; the symbol table of the
   program, or of the library that the kernel is in, says which name that is. */
#include "kernel.h"

#include "machine.h"
#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <elf.h>
#include <fstream>
#include <iterator>
#include <link.h>
#include <unordered_map>

namespace simt {
namespace {

struct shared_note {
    std::string type; /* the same from two files counts once */
    size_t bytes, align;
};

/* By the kernel's symbol. */
std::unordered_map<std::string, std::vector<shared_note>> &notes() {
    static std::unordered_map<std::string, std::vector<shared_note>> all;
    return all;
}

/* The symbol of the function that a type is local to; "" if it is local to none. */
std::string owner_of(const std::string &type) {
    size_t at = type.rfind("nsa__array_");
    if (at == std::string::npos || type[0] != 'Z') return "";
    while (at > 0 && isdigit(static_cast<unsigned char>(type[at - 1]))) at--;
    return at > 1 && type[at - 1] == 'E' ? "_Z" + type.substr(1, at - 2) : "";
}

std::unordered_map<const void *, kernel_facts> &facts() {
    static std::unordered_map<const void *, kernel_facts> all;
    return all;
}

/* The file that holds the code at an address, and where it is loaded. */
struct object {
    const unsigned char *address;
    std::string path;
    uint64_t base;
};
int find_object(dl_phdr_info *info, size_t, void *wanted) {
    object *o = static_cast<object *>(wanted);
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto &p = info->dlpi_phdr[i];
        const uint64_t from = info->dlpi_addr + p.p_vaddr,
                       at = reinterpret_cast<uint64_t>(o->address);
        if (p.p_type != PT_LOAD || at < from || at >= from + p.p_memsz) continue;
        o->path = *info->dlpi_name ? info->dlpi_name : "/proc/self/exe";
        o->base = info->dlpi_addr;
        return 1;
    }
    return 0;
}

/* Notes every function of an object's symbol table. */
void read_symbols(const object &o) {
    std::ifstream file(o.path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const auto at = [&](uint64_t offset) { return bytes.data() + offset; };
    ElfW(Ehdr) head;
    if (bytes.size() < sizeof head) return;
    memcpy(&head, at(0), sizeof head);
    std::vector<ElfW(Shdr)> sections(head.e_shnum);
    if (head.e_shoff + head.e_shnum * sizeof sections[0] > bytes.size()) return;
    memcpy(sections.data(), at(head.e_shoff), head.e_shnum * sizeof sections[0]);
    for (const auto &table : sections) {
        if (table.sh_type != SHT_SYMTAB) continue;
        const uint64_t names = sections[table.sh_link].sh_offset;
        for (uint64_t i = 0; i < table.sh_size / sizeof(ElfW(Sym)); i++) {
            ElfW(Sym) symbol;
            memcpy(&symbol, at(table.sh_offset + i * sizeof symbol), sizeof symbol);
            if ((symbol.st_info & 15) != STT_FUNC || !symbol.st_value) continue;
            const void *address = reinterpret_cast<const void *>(o.base + symbol.st_value);
            const char *name = at(names + symbol.st_name);
            kernel_facts &k = facts()[address];
            if (k.symbol.empty() || notes().count(name)) k.symbol = name;
        }
    }
}

/* Where dynamic memory begins: of all kernels of a program alike, also of those that have none. */
size_t dynamic_align = 1;

/* As ptxas lays arrays out: one behind the other, each at a multiple of its alignment, and filled
   up to where dynamic memory would begin. */
size_t layout(const std::vector<shared_note> &arrays) {
    size_t bytes = 0;
    for (const shared_note &a : arrays) bytes = (bytes + a.align - 1) / a.align * a.align + a.bytes;
    return (bytes + dynamic_align - 1) / dynamic_align * dynamic_align;
}

} // namespace

bool declare_shared(const char *type_name, size_t bytes, size_t align) {
    if (!bytes) {
        dynamic_align = std::max(dynamic_align, align);
        return true;
    }
    std::vector<shared_note> &arrays = notes()[owner_of(type_name)];
    const auto same = [&](const shared_note &a) { return a.type == type_name; };
    if (std::none_of(arrays.begin(), arrays.end(), same))
        arrays.push_back({type_name, bytes, align});
    return true;
}

static void look_up(kernel_facts &k) {
    const auto arrays = notes().find(k.symbol);
    k.known = true;
    k.static_bytes = arrays == notes().end() ? 0 : layout(arrays->second);
}

kernel_facts &facts_of(const void *kernel) {
    auto found = facts().find(kernel);
    if (found == facts().end()) {
        object o = {static_cast<const unsigned char *>(kernel), "", 0};
        if (dl_iterate_phdr(find_object, &o)) read_symbols(o);
        found = facts().find(kernel);
        if (found == facts().end()) {
            fprintf(stderr, "simt: %s has no symbol for the kernel at %p: link it without -s\n",
                    o.path.c_str(), kernel);
            abort();
        }
    }
    if (!found->second.known) look_up(found->second);
    return found->second;
}

bool declares(const void *kernel, const char *type_name) {
    const auto arrays = notes().find(facts_of(kernel).symbol);
    return arrays != notes().end() &&
           std::any_of(arrays->second.begin(), arrays->second.end(),
                       [&](const shared_note &a) { return a.type == type_name; });
}

size_t dynamic_limit(const kernel_facts &k) {
    if (k.leave >= 0) return static_cast<size_t>(k.leave);
    return shared_without_leave - std::min(k.static_bytes, shared_without_leave);
}

std::vector<function> functions() {
    std::vector<function> all;
    for (auto &f : facts()) {
        if (!f.second.known) look_up(f.second);
        all.push_back({f.second.symbol, f.second.static_bytes, f.second.launched});
    }
    return all;
}

void forget_leave() {
    for (auto &k : facts()) k.second.leave = -1;
}

} // namespace simt
