package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"golang.org/x/net/http2"

	"github.com/doze-run/doze/egress/tls/clienthello/hellotest"
)

// fronting makes one TLS connection, speaks HTTP/2 over it, and requests / of one authority
// after another, which curl refuses. It prints one line for each response: its status, a
// space, and its body.
//
//	client fronting [-connect HOST:PORT] [-sni NAME] [-ech NAME] AUTHORITY...
//
// With -ech it hides -sni behind that public name.
func fronting(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("fronting", flag.ContinueOnError)
	connect := flags.String("connect", "", "address of the server")
	sni := flags.String("sni", "", "server name of TLS")
	ech := flags.String("ech", "", "public name that hides it")
	if err := flags.Parse(args); err != nil {
		return err
	}
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", *connect)
	if err != nil {
		return err
	}
	defer raw.Close()
	config := &tls.Config{ServerName: *sni, InsecureSkipVerify: true, NextProtos: []string{"h2"}}
	if *ech != "" {
		if config.EncryptedClientHelloConfigList, err = hellotest.ECHConfigs(*ech); err != nil {
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
	for _, authority := range flags.Args() {
		if err := getRoot(ctx, client, authority); err != nil {
			return err
		}
	}
	return nil
}

func getRoot(ctx context.Context, client *http2.ClientConn, authority string) error {
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
