//go:build !race

package dns

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/doze-run/doze/testkit"
)

func TestMemoryOfServersAndNames(t *testing.T) {
	const servers, serverLimit, nameLimit = 1000, 1 << 10, 512 // bytes
	all := make([]*testServer, servers)
	if n := testkit.HeapGrowth(t, func() {
		for i := range all {
			all[i] = newTestServer(Config{})
		}
	}); n > servers*serverLimit {
		t.Errorf("%d bytes for each server before its first query, want at most %d", n/servers, serverLimit)
	}
	if n := testkit.HeapGrowth(t, func() {
		for i := range maxNames {
			all[0].names.assign(fmt.Sprintf("host-%d.example.com", i), time.Now())
		}
	}); n > maxNames*nameLimit {
		t.Errorf("%d bytes for each name, want at most %d", n/maxNames, nameLimit)
	}
	runtime.KeepAlive(all)
}
