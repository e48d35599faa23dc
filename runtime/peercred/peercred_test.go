package peercred_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/runtime/peercred"
)

func TestBothEndsOfASocketAreIdentified(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for name, conn := range map[string]net.Conn{"client": client, "server": server} {
		cred, err := peercred.Of(conn.(*net.UnixConn))
		if err != nil || int(cred.Pid) != os.Getpid() || int(cred.Uid) != os.Getuid() {
			t.Errorf("%s: %+v, %v", name, cred, err)
		}
	}
	client.Close()
	if cred, err := peercred.Of(client.(*net.UnixConn)); err == nil {
		t.Errorf("a closed connection: %+v", cred)
	}
}
