package main

import (
	"bytes"
	"fmt"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"
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

// dropFilePages lets go of the program's own pages, most of which only the start has needed: parsers, tables and the files in the
// binary. What is used again is mapped again from the system's cache of files. That is safe as only mappings are dropped that
// cannot be written and of which no page differs from the file, such as after relocation. Elsewhere than on Linux it does nothing.
func dropFilePages() {
	maps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return
	}
	var start, end uint64 // of a mapping that may be dropped; the same where it may not
	for line := range bytes.Lines(maps) {
		var from, to uint64
		var access string
		if n, _ := fmt.Sscanf(string(line), "%x-%x %s", &from, &to, &access); n == 3 {
			if start, end = from, to; access[1] != '-' || !bytes.ContainsRune(line, '/') {
				end = start
			}
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch string(name) {
		case "Anonymous", "Swap": // changed pages, also those that are swapped out
			if string(bytes.TrimSpace(value)) != "0 kB" {
				end = start
			}
		case "VmFlags": // the last line of a mapping
			if start < end {
				_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(start), uintptr(end-start), unix.MADV_DONTNEED)
			}
		}
	}
}
