//go:build unix

package policy

import "golang.org/x/sys/unix"

// reserve maps size bytes of address space, none of them accessible.
func reserve(size int) ([]byte, error) {
	return unix.Mmap(-1, 0, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

// commit makes reserved memory readable and writable.
func commit(memory []byte) error {
	return unix.Mprotect(memory, unix.PROT_READ|unix.PROT_WRITE)
}

// release returns reserved memory to the system.
func release(mapped []byte) error { return unix.Munmap(mapped) }
