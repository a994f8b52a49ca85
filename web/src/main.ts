/** Starts the page. */
import { mount } from 'svelte';
import './app.css';
import App from './App.svelte';
import { Chat } from './state/chat.svelte';

const target = document.getElementById('app');
if (target === null) throw new Error('index.html lacks #app');
void Chat.start().then((chat) => mount(App, { target, props: { chat } }));
