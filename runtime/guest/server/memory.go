package server

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// trimMemory returns the memory that an idle guest does not need to the kernel: garbage,
// and the pages of its own program, which come back from the page cache (64 KiB a fault)
// when they are used again. It takes about a millisecond.
func trimMemory() {
	runtime.GC() // leaves what sync.Pools hold; the next collection does not
	debug.FreeOSMemory()
	releaseProgram()
}

// releaseProgram drops the program's read-only pages from this process. Only a
// program with fixed addresses may do that: in another one, some of these pages
// hold relocations that are nowhere else.
func releaseProgram() {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil || !hasFixedAddresses("/proc/self/exe") {
		return
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		var from, to uintptr
		var mode string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &from, &to, &mode); err != nil {
			return
		}
		if mode[1] == '-' && bytes.HasSuffix(lines.Bytes(), []byte(" "+program)) {
			unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_DONTNEED)
		}
	}
}

// hasFixedAddresses reports whether an ELF file is of type ET_EXEC.
func hasFixedAddresses(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var header [18]byte
	if _, err := io.ReadFull(f, header[:]); err != nil {
		return false
	}
	const executable = 2
	return binary.NativeEndian.Uint16(header[16:]) == executable
}

// trimNow is for a node that is about to freeze the sandbox, which would otherwise hold
// the memory for days. The response ends with the connection: any other end would use 1 MB
// of the program again.
func (s *Server) trimNow(w http.ResponseWriter, _ *http.Request) error {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"); err == nil {
		s.requests.trimNow()
	}
	return nil
}
