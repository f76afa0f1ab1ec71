# cmake -DNVCC=... -DSOURCE=wrappers.cu -DINCLUDE=nsa/kernels -DWORK=folder -P check_ptx.cmake
# Compiles wrappers.cu for every architecture, any warning an error, and looks in the PTX for each
# instruction that a wrapper stands for: as often as it should be there, none where it must not be.
set(base
    "cp\\.async\\.cg\\.shared\\.global \\[%r[0-9]+\\], \\[%rd[0-9]+\\], 16, %r[0-9]+" 2
    "cp\\.async\\.ca\\.shared\\.global \\[%r[0-9]+\\], \\[%rd[0-9]+\\], 8, %r[0-9]+" 2
    "cp\\.async\\.ca\\.shared\\.global \\[%r[0-9]+\\], \\[%rd[0-9]+\\], 4, %r[0-9]+" 2
    "cp\\.async\\.commit_group" 2
    "cp\\.async\\.wait_group 1" 2
    "ldmatrix\\.sync\\.aligned\\.m8n8\\.x4\\.shared\\.b16" 2
    "ldmatrix\\.sync\\.aligned\\.m8n8\\.x4\\.trans\\.shared\\.b16" 2
    "mma\\.sync\\.aligned\\.m16n8k16\\.row\\.col\\.f32\\.f16\\.f16\\.f32" 1
    "mma\\.sync\\.aligned\\.m16n8k16\\.row\\.col\\.f32\\.bf16\\.bf16\\.f32" 1
    "barrier\\.arrive\\.aligned" 2
    "barrier\\.sync\\.aligned" 2
    "ex2\\.approx\\.ftz\\.f32" 2
    "lg2\\.approx\\.ftz\\.f32" 2
    "cvt\\.rn\\.f16x2\\.f32" 1
    "cvt\\.rn\\.bf16x2\\.f32" 1)
set(tma
    "mbarrier\\.init\\.shared::cta\\.b64" 2
    "mbarrier\\.arrive\\.shared::cta\\.b64 _" 2
    "mbarrier\\.arrive\\.expect_tx\\.shared::cta\\.b64 _" 2
    "mbarrier\\.try_wait\\.parity\\.shared::cta\\.b64" 2
    "fence\\.proxy\\.async\\.shared::cta" 2
    "cp\\.async\\.bulk\\.shared::cluster\\.global\\.mbarrier::complete_tx::bytes" 2
    "cp\\.async\\.bulk\\.tensor\\.2d\\.shared::cluster\\.global\\.mbarrier::complete_tx::bytes" 2
    "cp\\.async\\.bulk\\.tensor\\.3d\\.shared::cluster\\.global\\.mbarrier::complete_tx::bytes" 2
    "cp\\.async\\.bulk\\.tensor\\.4d\\.shared::cluster\\.global\\.mbarrier::complete_tx::bytes" 2
    "cp\\.async\\.bulk\\.tensor\\.2d\\.global\\.shared::cta\\.bulk_group" 2
    "cp\\.async\\.bulk\\.tensor\\.3d\\.global\\.shared::cta\\.bulk_group" 2
    "cp\\.async\\.bulk\\.tensor\\.4d\\.global\\.shared::cta\\.bulk_group" 2
    "cp\\.async\\.bulk\\.commit_group" 2
    "cp\\.async\\.bulk\\.wait_group\\.read 0" 2)
set(wgmma
    "wgmma\\.fence\\.sync\\.aligned" 12
    "wgmma\\.commit_group\\.sync\\.aligned" 12
    "wgmma\\.wait_group\\.sync\\.aligned 0" 12
    "setmaxnreg\\.inc\\.sync\\.aligned\\.u32 240" 2
    "setmaxnreg\\.dec\\.sync\\.aligned\\.u32 24" 2)
foreach(type IN ITEMS f16 bf16)
    foreach(n IN ITEMS 32 64 96 128 192 256)
        set(name "wgmma\\.mma_async\\.sync\\.aligned\\.m64n${n}k16\\.f32\\.${type}\\.${type}")
        # K innermost for both; M and N innermost; A from registers, N innermost.
        list(APPEND wgmma
            "${name} {[^}]*}, %rd[0-9]+, %rd[0-9]+, more, 1, 1, 0, 0" 1
            "${name} {[^}]*}, %rd[0-9]+, %rd[0-9]+, more, 1, 1, 1, 1" 1
            "${name} {[^}]*}, {[^}]*}, %rd[0-9]+, more, 1, 1, 1" 1)
    endforeach()
endforeach()

set(failures 0)
include("${CMAKE_CURRENT_LIST_DIR}/expect.cmake")

# The same list, each pattern zero times.
function(expect_none ptx architecture)
    set(none)
    set(list ${ARGN})
    while(list)
        list(POP_FRONT list pattern count)
        list(APPEND none "${pattern}" 0)
    endwhile()
    expect("${ptx}" ${architecture} ${none})
    set(failures ${failures} PARENT_SCOPE)
endfunction()

foreach(architecture IN ITEMS 80 86 89 90 90a 100 120)
    set(folder "${WORK}/${architecture}")
    file(REMOVE_RECURSE "${folder}")
    file(MAKE_DIRECTORY "${folder}")
    execute_process(
        COMMAND "${NVCC}" -gencode arch=compute_${architecture},code=sm_${architecture} -O3
            -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wconversion,-Wshadow "-I${INCLUDE}"
            --keep --keep-dir "${folder}" -c "${SOURCE}" -o "${folder}/wrappers.o"
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT result EQUAL 0 OR output MATCHES "warning")
        message("sm_${architecture}: nvcc says:\n${output}")
        math(EXPR failures "${failures} + 1")
        continue()
    endif()
    file(READ "${folder}/wrappers.ptx" ptx)
    string(REPLACE "" "\\" ptx "${ptx}")
    expect("${ptx}" ${architecture} ${base})
    if(architecture MATCHES "^(80|86|89)$")
        expect_none("${ptx}" ${architecture} ${tma})
    else()
        expect("${ptx}" ${architecture} ${tma})
    endif()
    if(architecture STREQUAL "90a")
        expect("${ptx}" ${architecture} ${wgmma})
    else()
        expect_none("${ptx}" ${architecture} ${wgmma})
    endif()
    message("sm_${architecture}: looked through")
endforeach()
if(failures)
    message(FATAL_ERROR "${failures} instructions or architectures are not as they should be")
endif()
