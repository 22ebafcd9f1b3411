package main

import (
	"bytes"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// collectPercent is GOGC: the garbage that the heap may accumulate, in percent of the live heap.
// Most of the heap is caches and the index, which hold few pointers, and caches reuse their memory,
// so collections are cheap and rare: 15 took no measurable CPU time more than Go's default of 100,
// and far less memory; 10 did. GOGC and GOMEMLIMIT in the environment take precedence.
const collectPercent = 15

// dropFilePages unmaps the binary's pages, most of which are needed at the start only: parsers, tables and embedded files. A page
// that is used again is mapped again from the page cache. That is safe, because it skips mappings that can be written or have a
// page that differs from the file, for example after relocation. It has an effect on Linux only.
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
