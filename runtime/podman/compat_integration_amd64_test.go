//go:build integration

package podman

import (
	"errors"
	"os/exec"
	"syscall"
	"testing"
)

// getpid asks for the process id as a program for i386 does.
const getpid = `
import ctypes, mmap
code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20; int 0x80; ret
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
`

func TestSystemCallsOfOtherArchitecturesAreRefused(t *testing.T) {
	b := open(t).boot(t, baseImage)
	out, code := b.try("python3 -c '" + getpid + "'")
	want := syscall.SIGSYS
	var exit *exec.ExitError
	if err := exec.CommandContext(t.Context(), "python3", "-c", getpid).Run(); errors.As(err, &exit) {
		want = exit.Sys().(syscall.WaitStatus).Signal() // a kernel without them, as under some hypervisors
	} else if err != nil {
		t.Fatal(err)
	}
	if code != 128+int(want) {
		t.Errorf("code %d, want %d: %s", code, 128+int(want), out)
	}
}
