// Runs a kernel on the emulated card.
#pragma once
#include <cstdio>
#include <cstdlib>

#include "cuda.h"

struct Launch {
    const char* name;
    void (*call)(const void* args);
    const void* args;
    Index grid;
    uint32_t threads, cluster;
    size_t shared;
};

void run(const Launch& what);
