# cmake -DNVCC=... -DSOURCE=paths.cu -DINCLUDE=nsa -DWORK=folder -P check_paths.cmake
# Compiles attention, any warning an error, and counts its products in the PTX: by wgmma for sm_90a,
# by mma.sync for a plain sm_90.
set(ss "\\.f32\\.bf16\\.bf16 {[^}]*}, %rd[0-9]+, %rd[0-9]+, more, 1, 1, 0, 0")
set(rs "\\.f32\\.bf16\\.bf16 {[^}]*}, {[^}]*}, %rd[0-9]+, more, 1, 1, 1")
# Forward comes twice, with and without block lists, and starts each product in two places; dq's loop
# three times, without lists in both of its kernels, and likewise in two places; dk and dv twice, and
# start k q in two places. q k: 4 forward; q k, dout v: 8 for dq; k q: 4, v dout: 4, of 64 rows, for dk
# and dv. p v: 4, ds k: 4, p dout and ds q, of 64 rows: 8.
set(expected_90a
    "wgmma\\.mma_async\\.sync\\.aligned\\.m64n64k16${ss}" 88
    "wgmma\\.mma_async\\.sync\\.aligned\\.m64n32k16${ss}" 0
    "wgmma\\.mma_async\\.sync\\.aligned\\.m64n64k16${rs}" 56
    "mma\\.sync\\.aligned" 0)
# The same products in pieces of 16 x 8: 64 forward, twice; 96 for dq, three times; 64 for
# dk and dv, of 32 rows.
set(expected_90
    "wgmma" 0
    "mma\\.sync\\.aligned\\.m16n8k16\\.row\\.col\\.f32\\.bf16\\.bf16\\.f32" 480)

set(failures 0)
include("${CMAKE_CURRENT_LIST_DIR}/expect.cmake")
file(MAKE_DIRECTORY "${WORK}")
foreach(architecture IN ITEMS 90 90a)
    set(ptx_file "${WORK}/paths_${architecture}.ptx")
    execute_process(
        COMMAND "${NVCC}" -std=c++17 -arch=compute_${architecture} -O3 -Werror all-warnings
            "-I${INCLUDE}" -ptx "${SOURCE}" -o "${ptx_file}"
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "sm_${architecture}: nvcc says:\n${output}")
    endif()
    file(READ "${ptx_file}" ptx)
    expect("${ptx}" ${architecture} ${expected_${architecture}})
endforeach()
if(failures)
    message(FATAL_ERROR "${failures} counts are not as they should be")
endif()
