# The executor of CUDA kernels on the CPU, for any CMake project: include(simt.cmake), after
# project(... C CXX). Sets NSA_HAVE_SIMT, and in NSA_SIMT_TEXT what was found or is missing. Then there are
#   nsa_simt_language                 what compiles a kernel for the executor; add include folders to it
#   nsa_simt_kernels(NAME SOURCES file... [DEFINITIONS name...])
#   nsa_simt_program(PROGRAM MODE SOURCES file... [KERNELS name...] [LIBRARIES target...]
#                    [DEFINITIONS name...])
# The last builds one program in one mode: plain, asan (AddressSanitizer and
# UndefinedBehaviorSanitizer), or check (races, uninitialised reads, bounds). Kernels are C++ files;
# those that several programs share are compiled once a mode by nsa_simt_kernels. C files are host code.
set(NSA_HAVE_SIMT OFF)
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(NSA_SIMT_TEXT "kernels are not run on the CPU: that takes g++")
    return()
endif()
find_path(NSA_CUDA_HEADERS cuda_bf16.h
    HINTS "${CMAKE_BINARY_DIR}/cuda-headers/include" ENV CUDA_PATH ENV CUDA_HOME
    PATHS /usr/local/cuda /opt/cuda PATH_SUFFIXES include
    DOC "where cuda_runtime_api.h and cuda_bf16.h are; no compiler or driver of CUDA is needed")
if(NOT NSA_CUDA_HEADERS)
    set(NSA_SIMT_TEXT "no CUDA headers (NSA_CUDA_HEADERS): kernels are not run on the CPU")
    return()
endif()
set(NSA_HAVE_SIMT ON)
set(NSA_SIMT_TEXT "kernels run on the CPU, with the headers in ${NSA_CUDA_HEADERS}")

# Never sanitized itself: it moves stacks, and reads what the sanitizers guard. Most of its compilation is
# headers, so that all but the switch between stacks, which has two forms, is one unit; machines that can have
# both forms test both.
set(nsa_simt_sources async atomic bulk checker collective graph kernel launch mbarrier memory report runtime
    schedule tensor tsan wgmma)
list(TRANSFORM nsa_simt_sources REPLACE "(.+)" "${CMAKE_CURRENT_LIST_DIR}/src/\\1.cpp")
add_library(nsa_simt OBJECT ${nsa_simt_sources})
set_target_properties(nsa_simt PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
add_library(nsa_simt_fiber OBJECT "${CMAKE_CURRENT_LIST_DIR}/src/fiber.cpp")
add_library(nsa_simt_fiber_ucontext OBJECT "${CMAKE_CURRENT_LIST_DIR}/src/fiber.cpp")
target_compile_definitions(nsa_simt_fiber_ucontext PRIVATE SIMT_UCONTEXT)

# What compiles a kernel for the executor. The CUDA types are read through pointers of other types,
# as nvcc allows.
add_library(nsa_simt_language INTERFACE)
target_compile_definitions(nsa_simt_language INTERFACE NSA_SIMT)
target_compile_options(nsa_simt_language INTERFACE -fno-strict-aliasing -g1 -Wno-unknown-pragmas
    "-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=" "-fdebug-prefix-map=${CMAKE_SOURCE_DIR}/=/./")
target_include_directories(nsa_simt_language INTERFACE "${CMAKE_CURRENT_LIST_DIR}/include")
target_include_directories(nsa_simt_language SYSTEM INTERFACE "${NSA_CUDA_HEADERS}")
foreach(target IN ITEMS nsa_simt nsa_simt_fiber nsa_simt_fiber_ucontext)
    target_compile_options(${target} PRIVATE -O2 -fno-sanitize=all)
    target_link_libraries(${target} PRIVATE nsa_simt_language)
endforeach()

# Compiling takes longer than what then runs.
set(nsa_simt_options_plain -O1)
# A caller in C may leave any number in an enum, and is to be refused by name. What AddressSanitizer sees
# too, a null pointer or one beyond its object, is looked at once; a call for each access compiles sooner.
set(nsa_simt_options_asan -O1 -fno-omit-frame-pointer -fsanitize=address,undefined
    -fno-sanitize=enum,null,object-size,pointer-overflow,vptr -fno-sanitize-recover=all
    "SHELL:--param asan-instrumentation-with-call-threshold=0")
# The calls alone: the executor answers them (src/tsan.cpp), libtsan is not linked. Host code in C
# does without.
set(nsa_simt_options_check -O1 "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=thread>"
    "$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param tsan-instrument-func-entry-exit=0>")

function(nsa_simt_compile target mode)
    target_compile_options(${target} PRIVATE -fno-sanitize=all ${nsa_simt_options_${mode}})
    target_link_libraries(${target} PRIVATE nsa_simt_language)
endfunction()

function(nsa_simt_kernels name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEFINITIONS")
    foreach(mode IN ITEMS plain asan check)
        add_library(${name}_${mode} OBJECT EXCLUDE_FROM_ALL ${arg_SOURCES})
        target_compile_definitions(${name}_${mode} PRIVATE ${arg_DEFINITIONS})
        nsa_simt_compile(${name}_${mode} ${mode})
    endforeach()
endfunction()

# FIBER names another switch of stacks, nsa_simt_fiber_ucontext. In mode check CHECK_RACES is defined.
function(nsa_simt_program program mode)
    cmake_parse_arguments(PARSE_ARGV 2 arg "" "FIBER" "KERNELS;SOURCES;LIBRARIES;DEFINITIONS")
    if(NOT arg_FIBER)
        set(arg_FIBER nsa_simt_fiber)
    endif()
    foreach(kernels IN LISTS arg_KERNELS)
        list(PREPEND arg_SOURCES $<TARGET_OBJECTS:${kernels}_${mode}>)
    endforeach()
    # The executor's objects stand first: of functions that several hold, its own are kept.
    add_executable(${program} $<TARGET_OBJECTS:nsa_simt> $<TARGET_OBJECTS:${arg_FIBER}>
        ${arg_SOURCES})
    set_target_properties(${program} PROPERTIES LINKER_LANGUAGE CXX)
    nsa_simt_compile(${program} ${mode})
    target_compile_definitions(${program} PRIVATE ${arg_DEFINITIONS})
    if(mode STREQUAL "check")
        target_compile_definitions(${program} PRIVATE CHECK_RACES)
    endif()
    target_link_libraries(${program} PRIVATE ${arg_LIBRARIES})
    if(mode STREQUAL "asan")
        target_link_options(${program} PRIVATE ${nsa_simt_options_asan})
    else()
        target_link_options(${program} PRIVATE -fno-sanitize=all)
    endif()
endfunction()
