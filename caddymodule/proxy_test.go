package caddymodule

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// proxyRequest sends the proxy text over a TLS connection for a name and returns
// the response.
func proxyRequest(t *testing.T, port int, sni, text string) (net.Conn, *bufio.Reader, *http.Response) {
	t.Helper()
	var conn *tls.Conn
	testkit.Eventually(t, sni+" has a certificate", func() (ok bool) { // Caddy issues it in the background
		var err error
		conn, err = tls.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port), &tls.Config{ServerName: sni, InsecureSkipVerify: true})
		return err == nil
	})
	t.Cleanup(func() { conn.Close() })
	fmt.Fprint(conn, text)
	from := bufio.NewReader(conn)
	method, _, _ := strings.Cut(text, " ")
	res, err := http.ReadResponse(from, &http.Request{Method: method})
	if err != nil {
		t.Fatal(err)
	}
	return conn, from, res
}

func TestTheProxyCarriesWhatShowsAKey(t *testing.T) {
	s := newSite(t)
	echo := listen(t)
	port := testkit.FreePort(t)
	sites := fmt.Sprintf(":%[1]d, proxy.doze.localhost:%[1]d {\n\tdoze_proxy\n}", port)
	s.mustLoad("egress {\n\t\t\tresolve echo.test "+echo.Addr().String()+"\n\t\t}", sites)
	connect := "CONNECT echo.test:7 HTTP/1.1\r\nHost: echo.test:7\r\n"
	key := "Proxy-Authorization: Bearer " + testToken + "\r\n"

	_, _, res := proxyRequest(t, port, "proxy.doze.localhost", connect+"\r\n")
	if res.StatusCode != http.StatusProxyAuthRequired || len(res.Header["Proxy-Authenticate"]) != 2 {
		t.Errorf("without a key: %s %v", res.Status, res.Header)
	}
	_, _, res = proxyRequest(t, port, "any.preview.doze.localhost", connect+key+"\r\n")
	if res.StatusCode != http.StatusMisdirectedRequest {
		t.Errorf("over a preview's connection: %s", res.Status)
	}
	conn, from, res := proxyRequest(t, port, "proxy.doze.localhost", connect+key+"\r\n")
	if res.StatusCode != http.StatusOK {
		t.Fatal(res.Status)
	}
	ping := func() {
		t.Helper()
		fmt.Fprintln(conn, "ping")
		if line, err := from.ReadString('\n'); line != "ping\n" {
			t.Fatalf("%q, %v", line, err)
		}
	}
	ping()
	s.mustLoad("sleep_after 10s\n\t\tegress {\n\t\t\tresolve echo.test "+echo.Addr().String()+"\n\t\t}", sites)
	ping() // a reload cuts no tunnel
}

// listen is a server that echoes what it receives.
func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() { // ends with the listener
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { // ends with its client
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	return l
}
