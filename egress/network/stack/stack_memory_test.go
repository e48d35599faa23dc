//go:build !race

package stack

import (
	"runtime"
	"testing"

	"github.com/doze-run/doze/testkit"
)

func TestMemoryOfStacksAndConnections(t *testing.T) {
	const stacks, connections, stackLimit, connectionLimit = 20, 500, 10 << 10, 4 << 10 // bytes
	h, conns := accepted(t)
	var kernels []*kernel
	if n := testkit.HeapGrowth(t, func() {
		for range stacks {
			_, k := start(t, Config{Handler: h})
			kernels = append(kernels, k)
		}
	}); n > stacks*stackLimit {
		t.Errorf("%d bytes for each stack without connections, want at most %d", n/stacks, stackLimit)
	}
	if n := testkit.HeapGrowth(t, func() {
		for range connections {
			conn, err := kernels[0].dial("tcp", somewhere)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			<-conns
		}
	}); n > connections*connectionLimit {
		t.Errorf("%d bytes for each connection with both of its ends, want at most %d", n/connections, connectionLimit)
	}
	runtime.KeepAlive(kernels)
}
