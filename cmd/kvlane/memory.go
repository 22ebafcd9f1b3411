package main

import (
	"os"
	"runtime/debug"
)

// collectPercent is the garbage that the heap may accumulate, in percent of the live heap
// (GOGC). Most of the heap is caches and the index, which hold few pointers, and caches
// reuse their memory, so that collections are cheap and rare: at 15 no more CPU time was
// measurable than at Go's default of 100, with far less memory. At 10 the cost shows. GOGC
// and GOMEMLIMIT in the environment take precedence.
const collectPercent = 15

// boundMemory sets the garbage collector for a service that keeps caches.
func boundMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectPercent)
	}
}
