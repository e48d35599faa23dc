// Fronting is a client for tests of egress that says of itself what curl will
// not. They copy it into sandboxes.
//
//	fronting [-connect HOST:PORT] [-sni NAME] [-ech NAME] AUTHORITY...
//
// It makes one TLS connection, speaks HTTP/2 over it, and asks for / of one
// authority after another. With -ech it hides -sni behind that public name. It
// prints one line for each response: its status, a space, and its body.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/net/http2"

	"github.com/doze-run/doze/egress/tls/clienthello/hellotest"
)

// patience with a server. It decides only how long a broken one keeps a test.
const patience = 30 * time.Second

func main() {
	connect := flag.String("connect", "", "where to")
	sni := flag.String("sni", "", "the server's name in TLS")
	ech := flag.String("ech", "", "the public name that hides it")
	flag.Parse()
	if err := run(*connect, *sni, *ech, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(connect, sni, ech string, authorities []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", connect)
	if err != nil {
		return err
	}
	defer raw.Close()
	config := &tls.Config{ServerName: sni, InsecureSkipVerify: true, NextProtos: []string{"h2"}}
	if ech != "" {
		if config.EncryptedClientHelloConfigList, err = hellotest.ECHConfigs(ech); err != nil {
			return err
		}
		config.MinVersion = tls.VersionTLS13
	}
	conn := tls.Client(raw, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		return err
	}
	client, err := new(http2.Transport).NewClientConn(conn)
	if err != nil {
		return err
	}
	for _, authority := range authorities {
		if err := get(ctx, client, authority); err != nil {
			return err
		}
	}
	return nil
}

func get(ctx context.Context, client *http2.ClientConn, authority string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+authority+"/", nil)
	if err != nil {
		return err
	}
	resp, err := client.RoundTrip(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(resp.StatusCode, strings.TrimSpace(string(body)))
	return err
}
