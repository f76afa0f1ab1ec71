# How this project compiles its own programs and tests. Nothing here reaches a user's build.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo, MinSizeRel" FORCE)
endif()
set(CMAKE_C_STANDARD 99)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")

# nsa_warnings: the strict set. Errors only where CMAKE_COMPILE_WARNING_AS_ERROR says so (the ci
# preset); CMake itself knows that variable from 3.24 on, so older ones are helped.
add_library(nsa_warnings INTERFACE)
set(nsa_host "$<COMPILE_LANG_AND_ID:C,GNU,Clang,AppleClang>")
set(nsa_host_cxx "$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>")
target_compile_options(nsa_warnings INTERFACE
    "$<$<OR:${nsa_host},${nsa_host_cxx}>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wshadow>"
    "$<${nsa_host}:-Wstrict-prototypes;-Wmissing-prototypes>")
if(CMAKE_VERSION VERSION_LESS 3.24 AND CMAKE_COMPILE_WARNING_AS_ERROR)
    target_compile_options(nsa_warnings INTERFACE "$<$<OR:${nsa_host},${nsa_host_cxx}>:-Werror>")
endif()

# nsa_program(NAME SOURCES file... [LIBRARIES target...]): one executable with the strict warnings,
# nsa.h on its include path and OpenMP where the machine has it.
function(nsa_program name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBRARIES")
    if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
        message(FATAL_ERROR "nsa_program(${name}): SOURCES file... [LIBRARIES target...]")
    endif()
    add_executable(${name} ${arg_SOURCES})
    target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} nsa::nsa nsa_openmp nsa_warnings)
endfunction()

# The labels that a test may carry; `ctest -L cpu` and the like rely on these names.
set(NSA_LABELS cpu simt gpu mpi trainer package docs hosts slow)

# nsa_add_test(NAME LABELS label... COMMAND ...): a ctest test. Exit code 77 means skipped, and no
# test may hang: the limit is far above what any of them needs.
function(nsa_add_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "LABELS;COMMAND")
    if(arg_UNPARSED_ARGUMENTS OR NOT arg_LABELS OR NOT arg_COMMAND)
        message(FATAL_ERROR "nsa_add_test(${name}): LABELS label... COMMAND ... [TIMEOUT seconds]")
    endif()
    foreach(label IN LISTS arg_LABELS)
        if(NOT label IN_LIST NSA_LABELS)
            message(FATAL_ERROR "nsa_add_test(${name}): label ${label} is none of: ${NSA_LABELS}")
        endif()
    endforeach()
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 1800) # for what hangs: under load a test takes ten times as long
    endif()
    add_test(NAME ${name} COMMAND ${arg_COMMAND})
    # Threads that wait for work must not keep a core from the next test.
    set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
        SKIP_RETURN_CODE 77 ENVIRONMENT OMP_WAIT_POLICY=passive)
endfunction()

# nsa_test(NAME LABELS label... [SOURCES file...] [LIBRARIES target...] [TIMEOUT seconds]): a test
# program NAME.c (unless SOURCES says otherwise) and its ctest test of the same name.
function(nsa_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "LABELS;SOURCES;LIBRARIES")
    if(NOT arg_SOURCES)
        set(arg_SOURCES ${name}.c)
    endif()
    nsa_program(${name} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES})
    nsa_add_test(${name} LABELS ${arg_LABELS} COMMAND ${name} TIMEOUT ${arg_TIMEOUT})
endfunction()
