// An empty library in memory that carries the unversioned name and needs the versioned one.
#include "unversioned_name.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <string>

namespace trt_nvfp4 {
namespace {

constexpr char const* kUnversioned = "libtensorrt_rtx.so";
constexpr char const* kVersioned = "libtensorrt_rtx.so.1";

#if defined(__aarch64__)
constexpr Elf64_Half kMachine = EM_AARCH64;
#else
constexpr Elf64_Half kMachine = EM_X86_64;
#endif

// The smallest that the loader takes: one segment, no symbols, and a table of what it is called and needs.
struct Library {
    Elf64_Ehdr header;
    Elf64_Phdr segments[2];
    Elf64_Dyn dynamic[7];
    Elf64_Sym no_symbol;
    char names[1 + sizeof("libtensorrt_rtx.so") + sizeof("libtensorrt_rtx.so.1")];
};

Library empty_library() {
    Library library{};
    Elf64_Ehdr& header = library.header;
    unsigned char const identity[] = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64, ELFDATA2LSB, EV_CURRENT};
    for (size_t i = 0; i < sizeof(identity); ++i) header.e_ident[i] = identity[i];
    header.e_type = ET_DYN;
    header.e_machine = kMachine;
    header.e_version = EV_CURRENT;
    header.e_phoff = offsetof(Library, segments);
    header.e_ehsize = sizeof(Elf64_Ehdr);
    header.e_phentsize = sizeof(Elf64_Phdr);
    header.e_phnum = 2;
    auto const segment = [](Elf64_Word type, size_t at, size_t bytes, size_t align) {
        return Elf64_Phdr{type, PF_R | PF_W, at, at, at, bytes, bytes, align};
    };
    library.segments[0] = segment(PT_LOAD, 0, sizeof(Library), 0x10000);  // a multiple of any page size
    library.segments[1] = segment(PT_DYNAMIC, offsetof(Library, dynamic), sizeof(library.dynamic), alignof(Elf64_Dyn));
    std::string const names = std::string(1, '\0') + kUnversioned + '\0' + kVersioned;
    names.copy(library.names, names.size());
    Elf64_Xword const own = 1, needed = names.size() - std::char_traits<char>::length(kVersioned);
    Elf64_Dyn const dynamic[] = {{DT_SONAME, {own}},
                                 {DT_NEEDED, {needed}},
                                 {DT_STRTAB, {offsetof(Library, names)}},
                                 {DT_STRSZ, {sizeof(library.names)}},
                                 {DT_SYMTAB, {offsetof(Library, no_symbol)}},
                                 {DT_SYMENT, {sizeof(Elf64_Sym)}},
                                 {DT_NULL, {0}}};
    for (size_t i = 0; i < sizeof(dynamic) / sizeof(dynamic[0]); ++i) library.dynamic[i] = dynamic[i];
    return library;
}

}  // namespace

void offer_unversioned_name() {
    if (void* const loaded = dlopen(kVersioned, RTLD_LAZY | RTLD_NOLOAD)) {
        dlclose(loaded);
    } else {
        return;
    }
    if (dlopen(kUnversioned, RTLD_LAZY) != nullptr) return;  // stays open, and keeps the name
    Library const library = empty_library();
    int const file = memfd_create(kUnversioned, MFD_CLOEXEC);
    if (file < 0) return;
    if (write(file, &library, sizeof(library)) == static_cast<ssize_t>(sizeof(library))) {
        dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_LAZY);
    }
    close(file);
}

}  // namespace trt_nvfp4
