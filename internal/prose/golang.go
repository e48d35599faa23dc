package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// source is a Go file that is being read.
type source struct {
	path  string
	fset  *token.FileSet
	file  *ast.File
	units []*unit
	used  map[ast.Node]bool // literals that are part of a text read before

	found []Finding
}

var generatedFile = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// golang reads a Go file. It returns nil for one that is generated.
func golang(file string, src []byte) (*source, error) {
	if generatedFile.Match(src) {
		return nil, nil
	}
	s := &source{path: file, fset: token.NewFileSet(), used: map[ast.Node]bool{}}
	var err error
	if s.file, err = parser.ParseFile(s.fset, file, src, parser.ParseComments|parser.SkipObjectResolution); err != nil {
		return nil, err
	}
	for _, group := range s.file.Comments {
		s.comments(group)
	}
	for _, spec := range s.file.Imports {
		s.used[spec.Path] = true
		s.imports(spec)
	}
	for _, decl := range s.file.Decls {
		if d, ok := decl.(*ast.GenDecl); ok {
			for _, spec := range d.Specs {
				if v, ok := spec.(*ast.ValueSpec); ok {
					declare(s, Name, v.Names...)
				}
			}
		}
	}
	ast.Inspect(s.file, s.node)
	return s, nil
}

func (s *source) line(n ast.Node) int { return s.fset.Position(n.Pos()).Line }

var directive = regexp.MustCompile(`^//(?:[a-z0-9]+:\S|line |export |extern |nolint)`)

// comments reads the paragraphs of a comment without its code.
func (s *source) comments(group *ast.CommentGroup) {
	p := &paragraphs{path: s.path, kind: Comment}
	inList := false
	for _, c := range group.List {
		if directive.MatchString(c.Text) {
			p.flush()
			continue
		}
		text := c.Text
		if after, ok := strings.CutPrefix(text, "/*"); ok {
			text = strings.TrimSuffix(after, "*/")
		} else {
			text = text[2:]
		}
		for i, line := range strings.Split(text, "\n") {
			line = strings.TrimPrefix(line, " ")
			trimmed := strings.TrimSpace(line)
			indented := trimmed != line && strings.HasPrefix(c.Text, "//") && trimmed != strings.TrimRight(line, " \t")
			switch {
			case indented && listItem.MatchString(trimmed):
				p.flush()
				inList = true
				trimmed = listItem.ReplaceAllString(trimmed, "")
			case indented && !inList:
				p.flush()
				continue
			case !indented && inList:
				p.flush()
				inList = false
			}
			p.add(s.line(c)+i, trimmed)
		}
	}
	p.flush()
	s.units = append(s.units, p.units...)
}

// testkitPath is the package that only tests may import; see imports.
const testkitPath = "github.com/doze-run/doze/testkit"

// imports checks that what is for tests stays there.
func (s *source) imports(spec *ast.ImportSpec) {
	dir := path.Dir(s.path)
	if strings.HasSuffix(s.path, "_test.go") || strings.HasSuffix(dir, "test") || dir == "testkit" || strings.HasPrefix(dir, "testkit/") || strings.HasPrefix(dir, "test/") {
		return
	}
	if p, _ := strconv.Unquote(spec.Path.Value); p == testkitPath || strings.HasPrefix(p, testkitPath+"/") {
		s.report(ruleTestkit, s.line(spec), p)
	}
}

func (s *source) report(r *Rule, line int, text string) {
	s.found = append(s.found, Finding{Path: s.path, Line: line, Rule: r, Text: text, Context: text})
}

func (s *source) node(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.CallExpr:
		s.call(n)
	case *ast.BinaryExpr:
		if !s.used[n] {
			s.text(String, n)
		}
	case *ast.BasicLit:
		if n.Kind == token.STRING && !s.used[n] {
			s.literal(n)
		}
	case *ast.FuncDecl:
		s.function(n)
	case *ast.Field:
		if n.Tag != nil {
			s.used[n.Tag] = true
		}
		declare(s, Local, n.Names...)
	case *ast.StructType:
		s.fields(n.Fields)
	case *ast.InterfaceType:
		s.fields(n.Methods)
	case *ast.TypeSpec:
		declare(s, Name, n.Name)
	case *ast.ValueSpec:
		declare(s, Local, n.Names...)
	case *ast.AssignStmt:
		if n.Tok == token.DEFINE {
			declare(s, Local, n.Lhs...)
		}
	case *ast.RangeStmt:
		if n.Tok == token.DEFINE {
			declare(s, Local, n.Key, n.Value)
		}
	}
	return true
}

// fields reads the names of a struct's fields, or an interface's methods.
func (s *source) fields(list *ast.FieldList) {
	for _, f := range list.List {
		declare(s, Name, f.Names...)
	}
}

// declare reads declared names, each once.
func declare[E ast.Expr](s *source, kind Kind, names ...E) {
	for _, e := range names {
		id, ok := ast.Expr(e).(*ast.Ident)
		if !ok || s.used[id] || id.Name == "_" {
			continue
		}
		s.used[id] = true
		s.units = append(s.units, single(s.path, kind, s.line(id), id.Name))
	}
}

var testFunction = regexp.MustCompile(`^(?:Test|Fuzz|Benchmark|Example)([A-Z_].*)$`)

func (s *source) function(f *ast.FuncDecl) {
	if m := testFunction.FindStringSubmatch(f.Name.Name); m != nil && f.Recv == nil && strings.HasSuffix(s.path, "_test.go") {
		s.used[f.Name] = true
		u := single(s.path, TestName, s.line(f.Name), strings.Join(words(m[1]), " "))
		s.units = append(s.units, u)
		return
	}
	declare(s, Name, f.Name)
	if f.Recv != nil && !f.Name.IsExported() && !ordinary[f.Name.Name] {
		s.report(ruleMethodName, s.line(f.Name), f.Name.Name)
	}
}

// call reads the messages of errors and log records.
func (s *source) call(n *ast.CallExpr) {
	fun, ok := n.Fun.(*ast.SelectorExpr)
	if !ok {
		return
	}
	of, _ := fun.X.(*ast.Ident)
	switch {
	case of != nil && (of.Name == "fmt" && fun.Sel.Name == "Errorf" || of.Name == "errors" && fun.Sel.Name == "New") && len(n.Args) > 0:
		if text, literals, _ := s.text(Error, n.Args[0]); literals > 0 {
			s.errorForm(n.Args[0], text)
		}
	case logger.MatchString(types.ExprString(fun.X)):
		s.logCall(fun.Sel.Name, n.Args)
	}
}

// text reads a literal, or literals joined by +, and counts them and the other operands,
// each of which is one word of the text.
func (s *source) text(kind Kind, e ast.Expr) (text string, literals, others int) {
	u := &unit{path: s.path, kind: kind}
	var read func(e ast.Expr)
	read = func(e ast.Expr) {
		if b, ok := e.(*ast.BinaryExpr); ok && b.Op == token.ADD {
			s.used[b] = true
			read(b.X)
			read(b.Y)
			return
		}
		u.offsets, u.numbers = append(u.offsets, len(u.text)), append(u.numbers, s.line(e))
		lit, ok := e.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING {
			u.text += "%s"
			others++
			return
		}
		s.used[lit] = true
		literals++
		value, _ := strconv.Unquote(lit.Value) // the parser has accepted it
		u.text += value
	}
	read(e)
	if literals > 0 && (kind != String || hasWords(u.text)) {
		s.units = append(s.units, u)
	}
	return u.text, literals, others
}

// literal reads a string that stands for itself; of a raw one each line.
func (s *source) literal(lit *ast.BasicLit) {
	value, _ := strconv.Unquote(lit.Value) // the parser has accepted it
	lines := []string{value}
	if strings.HasPrefix(lit.Value, "`") {
		lines = strings.Split(value, "\n")
	}
	for i, line := range lines {
		if hasWords(line) {
			s.units = append(s.units, single(s.path, String, s.line(lit)+i, line))
		}
	}
}

var (
	gerund = regexp.MustCompile(`^[a-z]+ing\b`)
	// notGerund are words that end as a gerund does but are nouns or adjectives where errors
	// begin with them.
	notGerund = wordSet(`string thing nothing something anything everything missing remaining warning during ping ring
		framing padding existing conflicting outgoing incoming following dangling trailing leading overlapping unending
		running sleeping starting stopping`)
	// properNouns begin errors in upper case.
	properNouns = wordSet(`Podman Caddy Caddyfile Badger Linux Unix Debian Go Git Docker WebSocket WebAssembly Host Origin Cookie
		Authorization Connection Upgrade Range Trailer Expect Location Python Node Ruby Java Squid Chromium Firefox Prometheus`)
)

func wordSet(s string) map[string]bool {
	set := map[string]bool{}
	for w := range strings.FieldsSeq(s) {
		set[w] = true
	}
	return set
}

// errorForm checks how an error begins.
func (s *source) errorForm(at ast.Expr, text string) {
	if w := gerund.FindString(text); w != "" && !notGerund[w] {
		s.report(ruleErrorGerund, s.line(at), clip(text))
	}
	if capital(text) {
		s.report(ruleErrorCapital, s.line(at), clip(text))
	}
}

var firstWord = regexp.MustCompile(`^[\p{L}\p{N}_-]+`)

// capital reports whether a message begins as a sentence: with a word that is in upper
// case only because it is the first.
func capital(text string) bool {
	word := firstWord.FindString(text)
	first, size := utf8.DecodeRuneInString(word)
	if !unicode.IsUpper(first) || properNouns[strings.TrimSuffix(word, "s")] || properNouns[word] {
		return false
	}
	rest := word[size:]
	return rest == "" && strings.HasPrefix(text, "A ") || rest != "" && strings.ToLower(rest) == rest && !strings.ContainsAny(rest, "-_.0123456789")
}

// logger finds an expression that is a *slog.Logger, judging by its name.
var logger = regexp.MustCompile(`(?:^|\.)(?:slog|[a-zA-Z]*[lL]og(?:ger)?)(?:\(.*\))?(?:\.With(?:Group)?\(.*\))*$`)

// logMethods have the index of the message among their arguments.
var logMethods = map[string]int{
	"Debug": 0, "Info": 0, "Warn": 0, "Error": 0,
	"DebugContext": 1, "InfoContext": 1, "WarnContext": 1, "ErrorContext": 1, "Log": 2, "LogAttrs": 2,
}

var (
	snakeCase = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)
	logStart  = regexp.MustCompile(`^(?:failed to|ignoring) `)
	// event finds the verb of an event: a past tense or a participle.
	event = regexp.MustCompile(`\b(?:[a-z]{2,}ed|woke|slept|began|broke|broken|came|went|gone|died|fell|froze|frozen|held|left|lost|made|met|ran|rose|sent|shut|split|stood|took|taken|was|were|did|wrote|written|found|is|are|has|have|does|do|ends|exceeds|lacks|differs|misses|needs|refuses|uses)\b`)
	// noEvent finds messages that name a possibility or no subject in place of an event.
	noEvent = regexp.MustCompile(`\b(?:cannot|may|what|something|who)\b`)
)

// logCall checks the message and the keys of a log record.
func (s *source) logCall(method string, args []ast.Expr) {
	if method == "With" {
		s.logKeys(args)
		return
	}
	i, ok := logMethods[method]
	if !ok || len(args) <= i {
		return
	}
	s.logKeys(args[i+1:])
	if _, isCall := args[i].(*ast.CallExpr); isCall {
		s.report(ruleLogConstant, s.line(args[i]), "a call")
		return
	}
	text, literals, others := s.text(Log, args[i])
	if _, joined := args[i].(*ast.BinaryExpr); joined && others > 0 {
		s.report(ruleLogConstant, s.line(args[i]), "a concatenation")
	}
	if literals == 0 {
		return // a constant or variable
	}
	if capital(text) {
		s.report(ruleLogCase, s.line(args[i]), clip(text))
	}
	gerund := gerund.FindString(text)
	switch {
	case gerund != "" && gerund != "ignoring" && !notGerund[gerund]:
		s.report(ruleLogGerund, s.line(args[i]), clip(text))
	case (strings.HasPrefix(method, "Warn") || strings.HasPrefix(method, "Error")) && !logStart.MatchString(text) && (!event.MatchString(text) || noEvent.MatchString(text)):
		s.report(ruleLogForm, s.line(args[i]), clip(text))
	}
}

// logKeys checks the keys among the arguments after a message, as far as they are literals.
func (s *source) logKeys(args []ast.Expr) {
	for i := 0; i < len(args); i++ {
		if call, ok := args[i].(*ast.CallExpr); ok && len(call.Args) > 0 {
			if fun := types.ExprString(call.Fun); strings.HasPrefix(fun, "slog.") {
				s.logKey(call.Args[0])
				if fun == "slog.Group" {
					s.logKeys(call.Args[1:])
				}
				continue
			}
		}
		if _, ok := args[i].(*ast.BasicLit); !ok {
			return // an attribute or a key in a variable, after which keys and values look alike
		}
		s.logKey(args[i])
		i++
	}
}

func (s *source) logKey(e ast.Expr) {
	if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
		if key, err := strconv.Unquote(lit.Value); err == nil && !snakeCase.MatchString(key) {
			s.report(ruleLogKey, s.line(lit), key)
		}
	}
}

// clip shortens a text for a message.
func clip(s string) string {
	if r := []rune(s); len(r) > 60 {
		return string(r[:57]) + "..."
	}
	return s
}
