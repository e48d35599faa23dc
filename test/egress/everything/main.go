// Everything writes all data to standard output that a program in a sandbox can read and
// that is not part of the image. Tests of egress search it for secrets. It includes files that
// are new, changed, on other file systems, or unlinked and still open; and the environments,
// command lines and memory of all other processes.
//
// It skips unreadable files, which no program in the sandbox can read, pages of zeros, and
// its own output.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// margin for clocks of file systems, which are coarser than the kernel's.
const margin = 10 * time.Second

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(to io.Writer) error {
	out := bufio.NewWriterSize(to, 1<<20)
	created, err := os.Stat("/etc/hostname") // the node writes it when it creates the sandbox
	if err != nil {
		return err
	}
	files(out, created.ModTime().Add(-margin))
	processes(out)
	return out.Flush()
}

// kernels are file systems of the kernel. The function processes reads /proc.
var kernels = map[string]bool{"/proc": true, "/sys": true}

func files(out io.Writer, since time.Time) {
	devices := map[string]uint64{} // of folders: files of an overlay may have another one
	_ = filepath.WalkDir("/", func(path string, _ fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil // unreadable, or deleted
		case kernels[path]:
			return fs.SkipDir
		}
		var st syscall.Stat_t
		if syscall.Lstat(path, &st) != nil {
			return nil
		}
		kind := st.Mode & syscall.S_IFMT // the entry's type is of the file below a mount, such as a device
		if kind == syscall.S_IFDIR {
			devices[path] = st.Dev
		}
		if devices[filepath.Dir(path)] == devices["/"] && time.Unix(st.Ctim.Unix()).Before(since) {
			return nil // part of the image
		}
		fmt.Fprintln(out, path) // a name may contain a secret, too
		if target, err := os.Readlink(path); err == nil {
			fmt.Fprintln(out, target)
		}
		if kind == syscall.S_IFREG {
			file(out, path)
		}
		return nil
	})
}

// maxFile bounds a file.
const maxFile = 64 << 20

func file(out io.Writer, path string) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	info, err := f.Stat()
	output, failed := os.Stdout.Stat()
	if errors.Join(err, failed) == nil && !os.SameFile(info, output) {
		_, _ = io.CopyN(out, f, maxFile)
	}
}

func processes(out io.Writer) {
	folders, _ := filepath.Glob("/proc/[0-9]*")
	for _, folder := range folders {
		if filepath.Base(folder) == fmt.Sprint(os.Getpid()) {
			continue
		}
		file(out, folder+"/environ")
		file(out, folder+"/cmdline")
		open, _ := filepath.Glob(folder + "/fd/*")
		for _, path := range open {
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
				file(out, path)
			}
		}
		memory(out, folder)
	}
}

// memory writes the pages that a process may write to.
func memory(out io.Writer, folder string) {
	maps, err := os.ReadFile(folder + "/maps")
	if err != nil {
		return
	}
	mem, err := os.Open(folder + "/mem")
	if err != nil {
		return
	}
	defer mem.Close()
	zero := make([]byte, os.Getpagesize())
	page := make([]byte, len(zero))
	for line := range strings.Lines(string(maps)) {
		var from, to int64
		var permissions string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &permissions); err != nil || !strings.HasPrefix(permissions, "rw") {
			continue
		}
		for at := from; at < to; at += int64(len(page)) {
			if _, err := mem.ReadAt(page, at); err != nil {
				break // the mapping was removed, or is a device's
			}
			if !bytes.Equal(page, zero) {
				_, _ = out.Write(page)
			}
		}
	}
}
