# The library: the two INTERFACE targets, how they are installed and found again.
# Not here: anything that compiles (NsaTargets.cmake).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

add_library(nsa INTERFACE)
add_library(nsa::nsa ALIAS nsa)
target_include_directories(nsa INTERFACE
    "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/nsa>"
    "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/nsa>")
# Of the machine that is compiled for, which need not be the one that installed: bare metal has libm, Windows none.
target_link_libraries(nsa INTERFACE "$<$<NOT:$<PLATFORM_ID:Windows>>:m>")

add_library(nsa_cuda INTERFACE)
add_library(nsa::cuda ALIAS nsa_cuda)
set_target_properties(nsa_cuda PROPERTIES EXPORT_NAME cuda)
target_link_libraries(nsa_cuda INTERFACE nsa)

# A parent that embeds the project installs what it likes; it does not get our files by surprise.
# Nothing is compiled, so both package files lie under share/, the same on every machine.
if(PROJECT_IS_TOP_LEVEL)
    set(nsa_config_dir "${CMAKE_INSTALL_DATADIR}/cmake/nsa")
    set(nsa_pc_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")
    install(DIRECTORY nsa/ DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/nsa"
        FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh" PATTERN src EXCLUDE)
    install(TARGETS nsa nsa_cuda EXPORT nsa)
    # Not as nsa-config.cmake itself: an export includes what begins with its own name, the version file too, whose
    # variables would then be the caller's.
    install(EXPORT nsa NAMESPACE nsa:: FILE nsa-targets.cmake DESTINATION "${nsa_config_dir}")
    write_basic_package_version_file("${PROJECT_BINARY_DIR}/nsa-config-version.cmake"
        COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
    install(FILES cmake/nsa-config.cmake "${PROJECT_BINARY_DIR}/nsa-config-version.cmake"
        DESTINATION "${nsa_config_dir}")

    # pkg-config finds the headers from where nsa.pc itself lies, so that the tree can be moved; not where one of
    # the folders has a place of its own, outside of the prefix.
    if(IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}" OR IS_ABSOLUTE "${nsa_pc_dir}")
        set(nsa_pc_include "${CMAKE_INSTALL_FULL_INCLUDEDIR}/nsa")
    else()
        file(RELATIVE_PATH nsa_include_from_pc "/${nsa_pc_dir}" "/${CMAKE_INSTALL_INCLUDEDIR}/nsa")
        set(nsa_pc_include "\${pcfiledir}/${nsa_include_from_pc}")
    endif()
    string(REPLACE " " "\\ " nsa_pc_include "${nsa_pc_include}") # it splits words as a shell does
    configure_file(cmake/nsa.pc.in nsa.pc @ONLY)
    install(FILES "${PROJECT_BINARY_DIR}/nsa.pc" DESTINATION "${nsa_pc_dir}")
endif()
