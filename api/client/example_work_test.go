package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

// serveWork adds the responses of the node of the examples about work in a sandbox.
func serveWork(mux *http.ServeMux, respond func(pattern string, status int, body string)) {
	events := func(pattern string, events ...string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for _, ev := range events {
				name, data, _ := strings.Cut(ev, " ")
				fmt.Fprintf(w, "event: %s\ndata: %s\n\n", name, data)
			}
		})
	}
	respond("POST /api/v1/sandbox/shop/sessions", 201, `{"id":"dev","pid":41,"shell":"bash","cwd":"/srv/shop","state":"running"}`)
	mux.HandleFunc("GET /api/v1/sandbox/shop/terminal", echoTerminal)
	respond("POST /api/v1/sandbox/shop/archive", 200, `{"name":"shop","state":"archived","archived":{"backup_id":"b4n8r2t6w9xz","size_bytes":247463936}}`)
	respond("POST /api/v1/sandbox/shop/process", 201, `{"id":"p-k3f9x2m7","name":"web","pid":42,"state":"running","restart":"on_wake"}`)
	respond("POST /api/v1/sandbox/shop/process/web/wait", 200,
		`{"process":{"id":"p-k3f9x2m7","name":"web","pid":42,"state":"running"},"line":"ready on port 5173","match":["port 5173","5173"],"waited_ms":812.4}`)
	events("GET /api/v1/sandbox/shop/files/watch",
		`watching {"path":"/srv/shop","recursive":true,"include":[],"exclude":[".git","node_modules"],"directories":3,"cursor":"k3f9x2m7-0"}`,
		`event {"type":"modify","path":"/srv/shop/app.js","is_dir":false,"cursor":"k3f9x2m7-1"}`,
		`event {"type":"move","path":"/srv/shop/new.js","from":"/srv/shop/old.js","is_dir":false,"cursor":"k3f9x2m7-2"}`,
		`stopped {"reason":"sandbox_ended","state":"stopped","detail":"the sandbox has stopped"}`)
	events("POST /api/v1/sandbox/shop/git/clone",
		`progress {"phase":"receiving_objects","done":120,"total":120,"bytes":48213}`,
		`complete {"path":"/workspace/doze","branch":"main","commit":"5f2c1e0d9b8a7f6e5d4c3b2a190817f6e5d4c3b2"}`)
	events("POST /api/v1/sandbox/shop/backup",
		`progress {"phase":"upload","bytes":123731968,"total_bytes":247463936,"entries":9120,"total_entries":20201}`,
		`complete {"id":"b4n8r2t6w9xz","sandbox_name":"shop","size_bytes":247463936,"stored_bytes":1258291}`)
	respond("POST /api/v1/sandbox/shop/restore", 200, `{"id":"k3f9x2m7q2az","name":"shop","state":"running"}`)
	respond("GET /api/v1/sandbox/shop/git/status", 200, `{"path":"/workspace/doze","branch":"main","ahead":0,"behind":0,"clean":false,"files":[{"path":"README.md","index":"unmodified","worktree":"modified"}]}`)
	events("POST /api/v1/sandbox/shop/contexts/python/run",
		`stdout {"data":"loading\n"}`,
		`result {"data":{"text/plain":"4.5"},"main":true}`,
		`complete {"execution_count":1,"timed_out":false,"truncated":false,"duration_ms":3.2}`)
	respond("POST /api/v1/sandbox/shop/contexts/javascript/run", 200,
		`{"stdout":"","stderr":"","results":[{"data":{"text/plain":"42"},"main":true}],"execution_count":1,"duration_ms":2.1}`)
	mux.HandleFunc("PUT /api/v1/sandbox/shop/files/write", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("If-Match") == `"before"` {
			w.Header().Set("Content-Type", problem.ContentType)
			w.WriteHeader(http.StatusPreconditionFailed)
			fmt.Fprint(w, `{"code":"file_conflict","detail":"/srv/shop/config.json has changed"}`)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"path":"/srv/shop/config.json","size":14,"etag":"\"17e2a\""}`)
	})
	mux.HandleFunc("GET /api/v1/sandbox/shop/files/read", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, `{"port": 3000}`)
	})
}

// echoTerminal serves the WebSocket of a terminal whose program prints the line that is typed.
func echoTerminal(w http.ResponseWriter, r *http.Request) {
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
	conn.Write(ctx, websocket.MessageBinary, []byte("name? "))
	send(types.TerminalReady{Type: types.TerminalMessageTypeReady, ID: "main", Cursor: 6})
	_, line, err := conn.Read(ctx)
	if err != nil {
		return
	}
	conn.Write(ctx, websocket.MessageBinary, []byte("hello, "+string(line)+"\n"))
	send(types.TerminalExit{Type: types.TerminalMessageTypeExit})
	conn.Close(websocket.StatusNormalClosure, "")
}

func ExampleClient_OpenSession() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()
	ctx := context.Background()

	session, err := c.OpenSession(ctx, "shop", types.OpenSessionRequest{ID: "dev", Cwd: "/srv/shop"})
	if err != nil {
		log.Fatal(err)
	}
	// The second command has the directory and the variables of the first.
	for _, command := range []string{"cd api && export PORT=3000", "pwd; echo $PORT"} {
		result, err := c.Exec(ctx, "shop", client.ExecRequest{Session: session.ID, Command: types.Command{Command: command}})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(result.Stdout)
	}
	// Output:
	// /srv/shop/api
	// 3000
}

func ExampleClient_OpenTerminal() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	terminal, err := c.OpenTerminal(context.Background(), "shop", client.TerminalOptions{ID: "main", Cols: 120, Rows: 40})
	if err != nil {
		log.Fatal(err)
	}
	defer terminal.Close()
	for {
		ev, err := terminal.Next()
		switch {
		case err != nil: // with client.ErrTerminalLost, connect again with terminal.Cursor
			log.Fatal(err)
		case ev.Ready != nil:
			if _, err := io.WriteString(terminal, "Ada"); err != nil {
				log.Fatal(err)
			}
		case ev.Truncated != nil:
			fmt.Println("(output is missing)")
		case ev.Exit != nil:
			fmt.Println("exit code", ev.Exit.Code)
			return
		default:
			fmt.Printf("%s", ev.Output)
		}
	}
	// Output:
	// name? hello, Ada
	// exit code 0
}

func ExampleClient_Watch() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	cursor := ""
	err := c.Watch(context.Background(), "shop", "/srv/shop", client.WatchOptions{After: cursor}, func(change client.Change) error {
		switch {
		case change.Event != nil && change.Event.Type == types.FileEventTypeMove:
			fmt.Println(change.Event.From, "is now", change.Event.Path)
		case change.Event != nil:
			fmt.Println(change.Event.Type, change.Event.Path)
		case change.Overflow != nil: // list the files again
			fmt.Println("changes were lost:", change.Overflow.Detail)
		}
		cursor = change.Cursor() // to go on here if the connection is lost
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// modify /srv/shop/app.js
	// /srv/shop/old.js is now /srv/shop/new.js
}

func ExampleClient_WaitProcess() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()
	ctx := context.Background()

	web, err := c.StartProcess(ctx, "shop", types.StartProcessRequest{
		Name: "web", Command: types.Command{Command: "npm run dev", Cwd: "/srv/shop"}, Restart: types.RestartOnWake,
	})
	if err != nil {
		log.Fatal(err)
	}
	ready, err := c.WaitProcess(ctx, "shop", web.Name, types.ReadyCondition{Log: `port (\d+)`})
	if err != nil { // a *problem.Problem with the last lines if the process has exited
		log.Fatal(err)
	}
	fmt.Println(ready.Line)
	fmt.Println("port", ready.Match[1])
	// Output:
	// ready on port 5173
	// port 5173
}

func ExampleClient_CloneRepository() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()
	ctx := context.Background()

	head, err := c.CloneRepository(ctx, "shop", types.GitCloneRequest{URL: "https://github.com/doze-run/doze.git", Depth: 1}, func(p types.GitProgress) {
		fmt.Println(p.Phase, p.Done, "of", p.Total)
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(head.Path, "is on", head.Branch)
	status, err := c.GitStatus(ctx, "shop", head.Path)
	if err != nil {
		log.Fatal(err)
	}
	for _, file := range status.Files {
		fmt.Println(file.Path, "differs")
	}
	// Output:
	// receiving_objects 120 of 120
	// /workspace/doze is on main
	// README.md differs
}

func ExampleClient_CreateBackup() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()
	ctx := context.Background()

	backup, err := c.CreateBackup(ctx, "shop", types.CreateBackupRequest{RetainLast: 7}, func(p types.BackupProgress) {
		fmt.Println(p.Phase, p.Entries, "of", p.TotalEntries)
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(backup.ID, "sent", backup.StoredBytes, "of", backup.SizeBytes, "bytes")
	sb, err := c.RestoreBackup(ctx, "shop", types.RestoreRequest{BackupID: backup.ID}, false, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sb.Name, sb.State)
	// Output:
	// upload 9120 of 20201
	// b4n8r2t6w9xz sent 1258291 of 247463936 bytes
	// shop running
}

func ExampleClient_Archive() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	sb, err := c.Archive(context.Background(), "shop", false, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sb.Name, sb.State, "with", sb.Archived.SizeBytes, "bytes in the object store")
	// Output: shop archived with 247463936 bytes in the object store
}

func ExampleClient_RunCode() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	result, err := c.RunCode(context.Background(), "shop", client.RunCodeRequest{Context: "javascript", Code: "6 * 7"})
	if err != nil {
		log.Fatal(err)
	}
	if result.Error != nil { // an exception of the code
		log.Fatal(result.Error.Message)
	}
	fmt.Println(result.Results[0].Data["text/plain"])
	// Output: 42
}

func ExampleClient_RunCodeStream() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	end, err := c.RunCodeStream(context.Background(), "shop", client.RunCodeRequest{Context: "python", Code: "print('loading')\n9 / 2"}, client.CodeEvents{
		Stdout: func(output []byte) error {
			fmt.Printf("%s", output)
			return nil
		},
		Result: func(value types.CodeValue) error { // also image/png, text/html and others
			fmt.Println(value.Data["text/plain"])
			return nil
		},
		Error: func(exception types.CodeError) error {
			return errors.New(exception.Message)
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("execution", end.ExecutionCount)
	// Output:
	// loading
	// 4.5
	// execution 1
}

func ExampleClient_ReadFile() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	file, err := c.ReadFile(context.Background(), "shop", "/srv/shop/config.json")
	if err != nil {
		log.Fatal(err)
	}
	defer file.Close()
	var config struct{ Port int }
	if err := json.NewDecoder(file).Decode(&config); err != nil {
		log.Fatal(err)
	}
	fmt.Println("port", config.Port)
	// Output: port 3000
}

func ExampleClient_WriteFileIf() {
	node := startNode()
	defer node.Close()
	c := connect(node)
	defer c.Close()

	// Only if the file is as it was read, with this ETag.
	_, err := c.WriteFileIf(context.Background(), "shop", "/srv/shop/config.json", client.WriteOptions{IfMatch: `"before"`}, strings.NewReader(`{"port": 8080}`))
	if refused, ok := errors.AsType[*problem.Problem](err); ok && refused.Code == problem.FileConflict {
		fmt.Println("changed meanwhile: read it again")
	} else if err != nil {
		log.Fatal(err)
	}
	// Output: changed meanwhile: read it again
}
