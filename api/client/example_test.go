package client_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

// startNode starts a server that responds as a node does.
func startNode() *httptest.Server {
	mux := http.NewServeMux()
	respond := func(pattern string, status int, body string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			fmt.Fprint(w, body)
		})
	}
	respond("GET /api/v1/node", 200, `{"id":"n4d8s2k6","version":"v1.0.0","engine":{"ok":true}}`)
	respond("GET /api/v1/node/df", 200, `{"unused_snapshots":{"count":2,"bytes":524288000},"largest_sandboxes":[{"name":"shop","disk_bytes":247463936}]}`)
	respond("POST /api/v1/sandbox", 201, `{"id":"k3f9x2m7q2az","name":"shop","state":"running"}`)
	mux.HandleFunc("POST /api/v1/sandbox/shop/exec", func(w http.ResponseWriter, r *http.Request) {
		var req types.ExecRequest
		json.NewDecoder(r.Body).Decode(&req)
		stdout := map[string]string{"npm run build": "built in 41 ms\n", "pwd; echo $PORT": "/srv/shop/api\n3000\n"}[req.Command.Command]
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(types.ExecResult{Stdout: stdout})
	})
	respond("POST /api/v1/sandbox/shop/expose", 200, `{"port":3000,"url":"https://3000-k3f9x2m7q2az.preview.example.com/","access":"public"}`)
	respond("PUT /api/v1/egress/rules", 200, `{"revision":7,"default":"deny","rules":[]}`)
	mux.HandleFunc("GET /api/v1/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "id: 8c1f2-204\nevent: woke\n"+
			`data: {"seq":17,"type":"woke","sandbox":"k3f9x2m7q2az","sandbox_name":"shop","kind":"warm","cause":"preview","cursor":"8c1f2-204"}`+"\n\n")
	})
	mux.HandleFunc("GET /api/v1/sandbox/shop/exec", sortInput)
	serveWork(mux, respond)
	return httptest.NewServer(mux)
}

// sortInput serves the WebSocket of a command that sorts its input.
func sortInput(w http.ResponseWriter, r *http.Request) {
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer conn.CloseNow()
	ctx := r.Context()
	send := func(message any) {
		text, _ := json.Marshal(message)
		conn.Write(ctx, websocket.MessageText, text)
	}
	conn.Read(ctx) // the command
	send(types.ExecStarted{Type: types.ExecMessageTypeStart, PID: 42, StdinWindowBytes: 1 << 18})
	var input []byte
	for {
		kind, message, err := conn.Read(ctx)
		if err != nil {
			return
		}
		if kind == websocket.MessageText { // the end of the input
			break
		}
		input = append(input, message[1:]...)
	}
	words := strings.Fields(string(input))
	conn.Write(ctx, websocket.MessageBinary, append([]byte{types.StreamStdout}, words[1]+"\n"+words[0]+"\n"...))
	send(types.ExecCompleted{Type: types.ExecMessageTypeComplete})
	conn.Close(websocket.StatusNormalClosure, "")
}

// connect returns a client of the node.
func connect(node *httptest.Server) *client.Client {
	c, err := client.New(client.Config{URL: node.URL + "/api/v1", Token: "doze_0123456789"})
	if err != nil {
		log.Fatal(err)
	}
	return c
}

func ExampleNew() {
	node := startNode()
	defer node.Close()

	c, err := client.New(client.Config{URL: node.URL + "/api/v1", Token: "doze_0123456789", UserAgent: "my-agent/1.0"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	state, err := c.Node(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(state.ID, state.Version, state.Engine.OK)
	// Output: n4d8s2k6 v1.0.0 true
}

func ExampleClient_Create() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	sb, created, err := c.Create(context.Background(), types.CreateSandboxRequest{Name: "shop", Image: "base"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sb.Name, sb.State, created)
	// Output: shop running true
}

func ExampleClient_Exec() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	result, err := c.Exec(context.Background(), "shop", client.ExecRequest{
		Command: types.Command{Command: "npm run build", Cwd: "/srv/shop"},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(result.Stdout)
	fmt.Println("exit code", result.ExitCode)
	// Output:
	// built in 41 ms
	// exit code 0
}

func ExampleClient_ExecStream() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	var out bytes.Buffer
	exit, err := c.ExecStream(context.Background(), "shop",
		client.ExecRequest{Command: types.Command{Argv: []string{"sort"}}},
		client.ExecStreams{Stdin: strings.NewReader("pear\napple\n"), Stdout: &out})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(out.String())
	fmt.Println("exit code", exit.ExitCode)
	// Output:
	// apple
	// pear
	// exit code 0
}

func ExampleClient_Expose() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	port, err := c.Expose(context.Background(), "shop", types.ExposePortRequest{Port: 3000, Access: types.AccessPublic})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(port.URL)
	// Output: https://3000-k3f9x2m7q2az.preview.example.com/
}

func ExampleClient_SetRules() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	rules, err := json.Marshal([]types.Rule{{Name: "github", Hosts: []string{"api.github.com"}, Methods: []string{"GET"}, Action: types.RuleActionAllow}})
	if err != nil {
		log.Fatal(err)
	}
	set, err := c.SetRules(context.Background(), "", client.RulesUpdate{Default: string(types.RuleDefaultDeny), Rules: rules})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("revision", set.Revision)
	// Output: revision 7
}

func ExampleClient_FollowFeed() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	err := c.FollowFeed(context.Background(), "", func(e types.FeedEvent) error {
		fmt.Println(e.SandboxName, e.Type, e.Cause)
		return nil
	}, nil)
	if err != nil {
		log.Fatal(err)
	}
	// Output: shop woke preview
}

func ExampleClient_DiskUsage() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	usage, err := c.DiskUsage(context.Background(), 1)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d unused snapshots have %d MiB\n", usage.UnusedSnapshots.Count, usage.UnusedSnapshots.Bytes>>20)
	fmt.Printf("the largest disk is of %s\n", usage.LargestSandboxes[0].Name)
	// Output:
	// 2 unused snapshots have 500 MiB
	// the largest disk is of shop
}
