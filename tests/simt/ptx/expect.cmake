# Counting instructions in PTX, for the scripts beside this file; no script by itself.

# expect(PTX ARCHITECTURE pattern count ...): each pattern is there as often as it should be; `failures`
# of the caller counts those that are not.
function(expect ptx architecture)
    set(list ${ARGN})
    while(list)
        list(POP_FRONT list pattern count)
        string(REGEX MATCHALL "${pattern}" found "${ptx}")
        list(LENGTH found times)
        if(NOT times EQUAL count)
            message("sm_${architecture}: '${pattern}' is there ${times} times, should be ${count}")
            math(EXPR failures "${failures} + 1")
        endif()
    endwhile()
    set(failures ${failures} PARENT_SCOPE)
endfunction()
